"""Images inside zip and tar archives, for the judge of stage "data". Shares no code with the training's own reading."""

import re
import tarfile
import zipfile
from collections.abc import Collection

_ADDRESS = re.compile(r"(zip|tar)://(.+)::([^:]+)", re.DOTALL)
_MOST = 200_000  # files of a tar that are passed over in the search for one


def images_at(addresses: Collection[str]) -> dict[str, bytes]:
    """Address, as zip://cats/1.png::/data/photos.zip -> content; those that cannot be read are left out."""
    wanted: dict[tuple[str, str], dict[str, str]] = {}
    for address in addresses:
        if (found := _ADDRESS.fullmatch(address)) is not None:
            kind, member, archive = found.groups()
            wanted.setdefault((kind, archive), {})[member] = address
    contents: dict[str, bytes] = {}
    for (kind, archive), members in wanted.items():
        try:
            contents |= (_in_zip if kind == "zip" else _in_tar)(archive, members)
        except (OSError, zipfile.BadZipFile, tarfile.TarError):
            continue
    return contents


def _in_zip(archive: str, members: dict[str, str]) -> dict[str, bytes]:
    contents = {}
    with zipfile.ZipFile(archive) as opened:
        for member, address in members.items():
            try:
                contents[address] = opened.read(member)
            except Exception:  # damaged: zlib.error, BadZipFile, RuntimeError, ...
                continue
    return contents


def _in_tar(archive: str, members: dict[str, str]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    with tarfile.open(archive, "r:") as opened:
        for number, member in enumerate(opened):
            if number == _MOST or len(contents) == len(members):
                break
            file = opened.extractfile(member) if member.isfile() and member.name in members else None
            if file is not None:
                contents[members[member.name]] = file.read()
    return contents


def names_in(path: str) -> list[str] | None:
    """The names of the files in an archive; None for a file that is none."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as opened:
                return [name for name in opened.namelist() if not name.endswith("/")]
        with tarfile.open(path, "r:") as opened:
            return [member.name for member in opened if member.isfile()]
    except (OSError, zipfile.BadZipFile, tarfile.TarError):
        return None
