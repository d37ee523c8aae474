"""The rows of a streamed data set as the files on this machine have them: shares no code with the stream.

`datasets` says which files a split consists of, and pyarrow reads them.
"""

import copy
import os
from bisect import bisect_right
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from utils.options.flags import DataOptions

_MOST = 32 * 2**20  # bytes of a row group: one is read for each image that is looked at


def open_local_shards(options: DataOptions) -> Any:
    """Returns what `Table` takes for a data set; None for shards elsewhere, in tar files, or with large row groups."""
    import datasets

    name, split = str(options.dataset_name), options.dataset_split
    if os.path.isfile(os.path.join(name, "dataset_dict.json")):
        return datasets.load_from_disk(os.path.join(name, split))
    if os.path.isfile(os.path.join(name, "state.json")):
        return datasets.load_from_disk(name)
    if not os.path.exists(name):
        return None
    config = options.dataset_config_name
    files = [name] if os.path.isfile(name) else datasets.load_dataset_builder(name, config).config.data_files[split]
    if not all(str(file).endswith(".parquet") and os.path.isfile(file) for file in files):
        return None
    found = _Parquet([str(file) for file in files])
    return found if found.largest <= _MOST else None


class _Parquet:
    """As much of a `datasets.Dataset` in arrow's format as `Table` needs."""

    def __init__(self, files: list[str]):
        import datasets

        self._files, self._columns = files, list[str]()
        footers = [pq.read_metadata(file) for file in files]
        self._groups = [
            (file, group, footer.row_group(group))
            for file, footer in zip(files, footers)
            for group in range(footer.num_row_groups)
        ]
        self._ends = list(accumulate(group.num_rows for _, _, group in self._groups))
        self.largest = max((group.total_byte_size for _, _, group in self._groups), default=0)
        self.features = datasets.Features.from_arrow_schema(pq.read_schema(files[0]))
        self.info = SimpleNamespace(splits=None)

    def __len__(self) -> int:
        return self._ends[-1]

    def with_format(self, kind: str) -> "_Parquet":
        return self

    def select_columns(self, columns: list[str]) -> "_Parquet":
        chosen = copy.copy(self)
        chosen._columns = columns
        return chosen

    def __getitem__(self, rows: slice | list[int]) -> pa.Table:
        if isinstance(rows, slice):
            return pa.concat_tables(pq.read_table(file, columns=self._columns) for file in self._files)[rows]
        return pa.concat_tables(self._row(row) for row in rows)

    def _row(self, row: int) -> pa.Table:
        number = bisect_right(self._ends, row)
        file, group, _ = self._groups[number]
        first = self._ends[number - 1] if number else 0
        table = pq.ParquetFile(file).read_row_group(group, columns=self._columns)
        return table.slice(row - first, 1)
