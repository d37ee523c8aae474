"""What a shard of a streamed dataset holds, by its format: parquet, tar (webdataset), or arrow (`save_to_disk`).

A shard consists of groups, the least that is read at once: row groups of parquet, record batches of arrow, samples of a tar.
Of a format, `features` gives the types of the columns, `index` some columns of all rows and what else `read` needs (`counts`
has its metadata), and `read` columns of a group. They raise what the shard's file system and its parser raise.
"""

import base64
import functools
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from utils.core.errors import UserError
from utils.data.shards import Shard, open_shard
from utils.data.stored_files import is_address, tar_files

_FOOTERS = 512  # kept in memory
_SAMPLES = 100  # of a tar in a group
_BUFFER = 8 * 2**20  # bytes of a tar that are read at once for its index
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".pgm")
_FILES = "files of the sample"  # in the index of a tar
_FIRST = 100  # samples that tell the columns of a tar
VERSION = 1  # of what follows from a shard: raise it when the same shard gives other rows
_ARROW_MAGIC, _ARROW_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)", re.DOTALL)  # of a file in a tar: that of its sample, and the rest
_ROWS, _PLACES, _SCHEMA = b"rows", b"places", b"schema"  # metadata of an index


def counts(index: pa.Table) -> list[int]:
    """Returns the rows of each group."""
    return json.loads(index.schema.metadata[_ROWS])


def columns_of(index: pa.Table) -> bytes:
    """Returns what is the same in shards that have the same columns."""
    return index.schema.metadata[_SCHEMA]


def _with(table: pa.Table, rows: list[int], schema: pa.Schema, places: list[int] | None = None) -> pa.Table:
    described = base64.b64encode(schema.remove_metadata().serialize().to_pybytes())
    return table.replace_schema_metadata({_ROWS: json.dumps(rows), _SCHEMA: described, _PLACES: json.dumps(places)})


class _Parquet:
    def features(self, shard: Shard) -> datasets.Features:
        return datasets.Features.from_arrow_schema(_footer(shard).schema.to_arrow_schema())

    def index(self, shard: Shard, columns: list[str]) -> pa.Table:
        with open_shard(shard) as file:
            parquet = pq.ParquetFile(file, metadata=_footer(shard), pre_buffer=True)
            footer = parquet.metadata
            rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
            return _with(parquet.read(columns=columns, use_threads=False), rows, parquet.schema_arrow)

    def read(self, shard: Shard, index: pa.Table, group: int, columns: list[str]) -> pa.Table:
        with open_shard(shard) as file:
            parquet = pq.ParquetFile(file, metadata=_footer(shard), pre_buffer=True)
            return parquet.read_row_group(group, columns=columns, use_threads=False)


@functools.lru_cache(maxsize=_FOOTERS)
def _footer(shard: Shard) -> Any:
    with open_shard(shard) as file:
        return pq.ParquetFile(file).metadata


class _Arrow:
    """The schema, then record batches; where the file has a footer it is not needed."""

    def features(self, shard: Shard) -> datasets.Features:
        with open_shard(shard) as file:
            return datasets.Features.from_arrow_schema(self._schema(file))

    def index(self, shard: Shard, columns: list[str]) -> pa.Table:
        places, parts, rows = [], [], []
        with open_shard(shard) as file:
            schema = self._schema(file)
            while True:
                place = file.tell()
                try:
                    message = pa.ipc.read_message(file)
                except EOFError:
                    file.seek(place)
                    if file.read(8) not in (_ARROW_END, _ARROW_END[4:]):
                        raise pa.ArrowInvalid("the file ends too early") from None
                    break
                if message.type == "dictionary":
                    raise UserError(f"--streaming cannot read the dictionaries in {shard.address}\nsave it as parquet")
                batch = pa.ipc.read_record_batch(message, schema)
                places.append(place)
                rows.append(batch.num_rows)
                parts.append(batch.select(columns).take(pa.array(range(batch.num_rows))))  # a copy: the images can go
        chosen = pa.schema([schema.field(name) for name in columns])
        return _with(pa.Table.from_batches(parts, chosen), rows, schema, places)

    def read(self, shard: Shard, index: pa.Table, group: int, columns: list[str]) -> pa.Table:
        with open_shard(shard) as file:
            schema = self._schema(file)
            file.seek(json.loads(index.schema.metadata[_PLACES])[group])
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
        return pa.Table.from_batches([batch.select(columns)])

    def _schema(self, file: Any) -> pa.Schema:
        file.seek(8 if file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC else 0)
        return pa.ipc.read_schema(pa.ipc.read_message(file))


class Tar:
    """Files whose names are the same up to the first dot are one sample, and what follows the dot names the column.

    `.cls` holds a whole number or a name, `.txt` a text, and the fields of `.json` become columns. The first samples tell the
    columns. A sample that lacks the `jpg` which is asked for has its `png` in that place, where that is its only one. A text
    alone is no sample.
    """

    def features(self, shard: Shard) -> datasets.Features:
        with open_shard(shard) as file:
            first = list(itertools.islice(self._samples(file, shard), _FIRST))
        kinds: dict[str, Any] = {}
        for _, values in first:
            for name, value in values.items():
                whole = isinstance(value, int) and kinds.get(name) != datasets.Value("string")
                kinds[name] = datasets.Value("int64" if whole else "string")
        usual = Counter(column for files, _ in first for column in files)
        # jpg before seg.png, then the more frequent one
        images = {column: datasets.Image() for column in sorted(usual, key=lambda name: ("." in name, -usual[name]))}
        return datasets.Features(images | {name: kind for name, kind in kinds.items() if name not in images})

    def index(self, shard: Shard, columns: list[str]) -> pa.Table:
        table: dict[str, list] = {name: [] for name in (_FILES, *columns)}
        with open_shard(shard) as file:
            for files, values in self._samples(file, shard):
                table[_FILES].append(list(files.values()))
                for name in columns:
                    table[name].append(values.get(name))
        for name in columns:
            if any(isinstance(value, str) for value in table[name]):
                table[name] = [None if value is None else str(value) for value in table[name]]
        samples = len(table[_FILES])
        rows = [min(_SAMPLES, samples - first) for first in range(0, samples, _SAMPLES)]
        place = {"column": pa.string(), "offset": pa.int64(), "size": pa.int64(), "name": pa.string()}
        arrays = {_FILES: pa.array(table.pop(_FILES), pa.list_(pa.struct(place)))}
        return _with(pa.table(arrays | table), rows, pa.schema([]))

    def read(self, shard: Shard, index: pa.Table, group: int, columns: list[str]) -> pa.Table:
        (column,), chosen = columns, []
        for files in index.column(_FILES).slice(group * _SAMPLES, _SAMPLES).to_pylist():
            plain = [file for file in files if "." not in column and "." not in file["column"]]  # jpg and png, not seg.png
            own = [file for file in files if file["column"] == column] or (plain if len(plain) == 1 else [])
            chosen.append(own[0] if own else None)
        there = [file for file in chosen if file is not None]
        first = min((file["offset"] for file in there), default=0)
        last = max((file["offset"] + file["size"] for file in there), default=0)
        with open_shard(shard) as opened:
            opened.seek(first)
            data = opened.read(last - first)
        if len(data) < last - first:
            raise EOFError("the file ends too early")
        images = []
        for file in chosen:
            start = 0 if file is None else file["offset"] - first
            content = None if file is None else data[start : start + file["size"]]
            images.append({"bytes": content, "path": file and file["name"]})
        return pa.table({column: pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))})

    def _samples(self, file: Any, shard: Shard) -> Iterator[tuple[dict[str, dict], dict[str, Any]]]:
        """(its images: column -> place; its values: column -> number or text) of each sample. Raises ReadError at its end where
        it is damaged."""
        source = io.BufferedReader(file, _BUFFER) if is_address(shard.address) else file
        named = ((found, place) for name, *place in tar_files(source) if (found := _NAME.fullmatch(name)))
        for _, sample in itertools.groupby(named, lambda each: each[0][1]):
            files, values = dict[str, dict](), dict[str, Any]()
            for found, (offset, size) in sample:
                column = found[2].lower()
                if f".{column}".endswith(_IMAGES):
                    files[column] = {"column": column, "offset": offset, "size": size, "name": found[0]}
                elif column in ("cls", "txt", "json"):
                    source.seek(offset)
                    values |= self._values(column, source.read(size))
            if files or values.keys() - {"txt"}:
                yield files, values

    def _values(self, column: str, data: bytes) -> dict[str, Any]:
        text = data.decode("utf-8", "replace").strip()
        if column == "json":
            try:
                return {name: value for name, value in json.loads(text).items() if isinstance(value, int | str)}
            except (ValueError, AttributeError):
                return {}
        return {column: int(text) if column == "cls" and text.lstrip("-").isdecimal() else text}


def format_of(shard: Shard) -> _Parquet | _Arrow | Tar:
    """Returns what reads a shard. Raises UserError for a compressed tar file."""
    name = shard.name.lower().partition("?")[0]
    if name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise UserError(f"--streaming cannot read parts of the compressed file {shard.address}\nuncompress it to .tar")
    return Tar() if name.endswith(".tar") else _Arrow() if name.endswith(".arrow") else _Parquet()
