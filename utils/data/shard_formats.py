"""What a shard of a streamed dataset holds, by its format: parquet, tar (webdataset), or arrow (`save_to_disk`).

A shard consists of groups, the least that is read at once: row groups of parquet, record batches of arrow, samples of a tar.
"""

import base64
import functools
import io
import json
import tarfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from utils.core.errors import UserError
from utils.data.shards import Shard, open_shard

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_FOOTERS = 512  # kept in memory
_SAMPLES = 100  # of a tar in a group
_BUFFER = 8 * 2**20  # bytes of a tar that are read at once for its index
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".pgm")
_OFFSET, _SIZE, _NAME = "offset of ", "size of ", "name of "  # a file in a tar, in the index
_ARROW_MAGIC = b"ARROW1"
_ROWS, _PLACES, _SCHEMA = b"rows", b"places", b"schema"  # metadata of an index


class Format(Protocol):
    def features(self, shard: Shard) -> "datasets.Features":
        """Returns the types of the columns. This and the others raise what the shard's file system and its parser raise."""

    def index(self, shard: Shard, columns: list[str]) -> "pa.Table":
        """Returns `columns` of all rows, and what else `read` needs; see `counts` for its metadata."""

    def read(self, shard: Shard, index: "pa.Table", group: int, column: str) -> "pa.Table":
        """Returns one column of a group."""


def format_of(shard: Shard) -> Format:
    """Raises UserError for a compressed tar file."""
    name = shard.name.lower()
    if name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise UserError(f"--streaming cannot read parts of the compressed file {shard.address}\nuncompress it to .tar")
    return _Tar() if name.endswith(".tar") else _Arrow() if name.endswith(".arrow") else _Parquet()


def counts(index: "pa.Table") -> list[int]:
    """Returns the rows of each group."""
    return json.loads(index.schema.metadata[_ROWS])


def columns_of(index: "pa.Table") -> bytes:
    """Returns what is the same in shards that have the same columns."""
    return index.schema.metadata[_SCHEMA]


def _with(table: "pa.Table", rows: list[int], schema: "pa.Schema", places: list[int] | None = None) -> "pa.Table":
    described = base64.b64encode(schema.remove_metadata().serialize().to_pybytes())
    return table.replace_schema_metadata({_ROWS: json.dumps(rows), _SCHEMA: described, _PLACES: json.dumps(places)})


class _Parquet:
    def features(self, shard: Shard) -> "datasets.Features":
        import datasets

        return datasets.Features.from_arrow_schema(_footer(shard).schema.to_arrow_schema())

    def index(self, shard: Shard, columns: list[str]) -> "pa.Table":
        import pyarrow.parquet as pq

        with open_shard(shard) as file:
            parquet = pq.ParquetFile(file, metadata=_footer(shard), pre_buffer=True)
            footer = parquet.metadata
            rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
            return _with(parquet.read(columns=columns, use_threads=False), rows, parquet.schema_arrow)

    def read(self, shard: Shard, index: "pa.Table", group: int, column: str) -> "pa.Table":
        import pyarrow.parquet as pq

        with open_shard(shard) as file:
            parquet = pq.ParquetFile(file, metadata=_footer(shard), pre_buffer=True)
            return parquet.read_row_group(group, columns=[column], use_threads=False)


@functools.lru_cache(maxsize=_FOOTERS)
def _footer(shard: Shard) -> Any:
    import pyarrow.parquet as pq

    with open_shard(shard) as file:
        return pq.ParquetFile(file).metadata


class _Arrow:
    """The schema, then record batches; where the file has a footer it is not needed."""

    def features(self, shard: Shard) -> "datasets.Features":
        import datasets

        with open_shard(shard) as file:
            return datasets.Features.from_arrow_schema(self._schema(file))

    def index(self, shard: Shard, columns: list[str]) -> "pa.Table":
        import pyarrow as pa

        places, batches = [], []
        with open_shard(shard) as file:
            schema = self._schema(file)
            while True:
                place = file.tell()
                try:
                    message = pa.ipc.read_message(file)
                except EOFError:
                    break
                if message.type == "dictionary":
                    raise UserError(f"--streaming cannot read the dictionaries in {shard.address}\nsave it as parquet")
                places.append(place)
                batches.append(pa.ipc.read_record_batch(message, schema).select(columns))
        rows = [batch.num_rows for batch in batches]
        chosen = pa.schema([schema.field(name) for name in columns])
        return _with(pa.Table.from_batches(batches, chosen), rows, schema, places)

    def read(self, shard: Shard, index: "pa.Table", group: int, column: str) -> "pa.Table":
        import pyarrow as pa

        with open_shard(shard) as file:
            schema = self._schema(file)
            file.seek(json.loads(index.schema.metadata[_PLACES])[group])
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
        return pa.Table.from_batches([batch.select([column])])

    def _schema(self, file: Any) -> "pa.Schema":
        import pyarrow as pa

        if file.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC:
            file.seek(0)
        else:
            file.seek(8)
        return pa.ipc.read_schema(pa.ipc.read_message(file))


class _Tar:
    """Files whose names are the same up to the first dot are one sample, and what follows the dot names the column.

    `.cls` holds a whole number, `.txt` a text, and the fields of `.json` become columns. The columns are those of the first
    sample. A sample that lacks the file of an image column has another image in its place, the first one.
    """

    def features(self, shard: Shard) -> "datasets.Features":
        import datasets

        with open_shard(shard) as file:
            members, values = next(self._samples(file), ({}, {}))
        kinds: dict[str, Any] = {name: datasets.Image() for name in members}
        for name, value in values.items():
            kinds[name] = datasets.Value("int64" if isinstance(value, int) else "string")
        return datasets.Features(kinds)

    def index(self, shard: Shard, columns: list[str]) -> "pa.Table":
        import pyarrow as pa

        table: dict[str, list] = {}
        samples, images, texts = 0, None, None
        with open_shard(shard) as file:
            for members, values in self._samples(file):
                if images is None:
                    images, texts = list(members), list(values)
                    titles = [title + name for name in images for title in (_OFFSET, _SIZE, _NAME)]
                    table = {title: [] for title in [*titles, *columns]}
                samples += 1
                for name in images:
                    found = members.get(name) or next(iter(members.values()), None)
                    for title, value in zip((_OFFSET, _SIZE, _NAME), found or (None, None, None)):
                        table[title + name].append(value)
                for name in columns:
                    table[name].append(values.get(name))
        rows = [min(_SAMPLES, samples - first) for first in range(0, samples, _SAMPLES)]
        schema = pa.schema([(name, pa.binary()) for name in [*(images or []), *sorted(texts or [])]])
        return _with(pa.table(table), rows, schema)

    def read(self, shard: Shard, index: "pa.Table", group: int, column: str) -> "pa.Table":
        import pyarrow as pa

        part = index.slice(group * _SAMPLES, _SAMPLES)
        offsets, sizes, names = (part.column(title + column).to_pylist() for title in (_OFFSET, _SIZE, _NAME))
        there = [(offset, offset + size) for offset, size in zip(offsets, sizes) if offset is not None]
        first, last = min((start for start, _ in there), default=0), max((stop for _, stop in there), default=0)
        with open_shard(shard) as file:
            file.seek(first)
            data = _exactly(file, last - first)
        images = [
            {"bytes": None if offset is None else data[offset - first : offset - first + size], "path": name}
            for offset, size, name in zip(offsets, sizes, names)
        ]
        return pa.table({column: pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))})

    def _samples(self, file: Any) -> Iterator[tuple[dict[str, tuple[int, int, str]], dict[str, Any]]]:
        """(its images: column -> offset, size and name; its values: column -> number or text) of each sample."""
        key, members, values = "", dict[str, tuple[int, int, str]](), dict[str, Any]()
        buffered = io.BufferedReader(file, _BUFFER) if isinstance(file, io.RawIOBase) else file
        with tarfile.open(fileobj=buffered, mode="r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, dot, ending = name.partition(".")
                if not member.isfile() or not dot or not stem:  # or a hidden file
                    continue
                if f"{folder}/{stem}" != key and (members or values):
                    yield members, values
                    members, values = {}, {}
                key, column = f"{folder}/{stem}", ending.lower()
                if f".{column}".endswith(_IMAGES):
                    members[column] = (member.offset_data, member.size, member.name)
                elif column in ("cls", "txt", "json"):
                    values |= self._values(column, archive.extractfile(member).read())  # type: ignore[union-attr]
                archive.members.clear()  # type: ignore[attr-defined]  # its memory
        if members or values:
            yield members, values

    def _values(self, column: str, data: bytes) -> dict[str, Any]:
        text = data.decode("utf-8", "replace").strip()
        try:
            if column == "cls":
                return {column: int(text)}
            if column == "json":
                return {name: value for name, value in json.loads(text).items() if isinstance(value, int | str)}
        except (ValueError, AttributeError):
            return {}
        return {column: text}


def _exactly(file: Any, size: int) -> bytes:
    parts = []
    while size > 0:
        part = file.read(size)
        if not part:
            raise EOFError("the file ends too early")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
