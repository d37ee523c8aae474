"""Parquet shards of small images, and what loads them as a stream."""

import contextlib
import io
import socket
import struct
import tarfile
import time

import numpy as np
from hub_stand_in import Answers, serving
from PIL import Image

ROWS, GROUP, SHARDS = 25, 10, 3  # so the last row group of each shard is shorter


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(value).integers(0, 256, (8, 10, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_shards(folder, damaged=(), empty=()):
    import datasets

    folder.mkdir()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    for shard in range(SHARDS):
        numbers = range(shard * ROWS, (shard + 1) * ROWS)
        data = [b"no image" if number in damaged else png(number) for number in numbers]
        images = [None if number in empty else {"bytes": each, "path": None} for number, each in zip(numbers, data)]
        columns = {"image": images, "label": [number % 2 for number in numbers]}
        dataset = datasets.Dataset.from_dict(columns, features=features)
        dataset.to_parquet(folder / f"train-{shard:05}.parquet", batch_size=GROUP)
    return folder


def write_tars(folder, numbers, files=lambda number: {"png": png(number), "cls": str(number % 2).encode()}):
    """Two webdataset shards."""
    folder.mkdir()
    for shard, part in enumerate(np.array_split(np.array(numbers), 2)):
        with tarfile.open(folder / f"train-{shard:05}.tar", "w") as archive:
            archive.addfile(tarfile.TarInfo("samples/.hidden"))
            for number in part.tolist():
                for ending, data in files(number).items():
                    member = tarfile.TarInfo(f"samples/{number:06}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return folder


@contextlib.contextmanager
def web_server(folder, faults=()):
    """Serves parts of the files of `folder`; the first requests that the test lets fail meet `faults`, one each."""
    faults, asked = list(faults), []

    class Handler(Answers):
        def do_GET(self):
            path = folder / self.path.strip("/")
            asked.append(path.name)
            fault = faults.pop(0) if faults else None
            if fault == "stall":
                time.sleep(0.5)
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return self.connection.close()
            if fault in (500, 404) or not path.is_file():
                return self.reply(fault or 404, b"")
            data, stamp = path.read_bytes(), {"ETag": f'"{path.stat().st_mtime_ns}"'}
            if fault == "whole":
                return self.reply(200, data, stamp)
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            self.reply(206, part, stamp | {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}, fault and 3)
            self.close_connection = fault == "short"

        def handle_one_request(self):
            with contextlib.suppress(OSError, ValueError):  # of the connections that the test cuts
                super().handle_one_request()

    with serving(Handler) as address:
        yield address, faults, asked
