"""Findings about the options of a run, known before its first update: the rows of `options_table`."""

from utils.diagnostics.finding import Finding, Found
from utils.diagnostics.options_table import ROWS, Facts, UnknownFact
from utils.runs.record import RunRecord


def options_amiss(record: RunRecord) -> Found:
    facts = Facts(record)
    found: dict[str, list[tuple[str, str]]] = {}
    for row in ROWS:
        try:
            figure, what = row.figure(facts)
        except UnknownFact:
            continue
        yield row.code
        if figure > min(row.info, row.warning):
            found.setdefault(row.code, []).append(("warning" if figure > row.warning else "info", what))
    for code, said in found.items():
        worst = "warning" if any(severity == "warning" for severity, _ in said) else "info"
        yield Finding(code, worst, "; ".join(what for severity, what in said if severity == worst))
