"""CIFAR-10 from made-up files and archives: read, normalized, split, damaged, downloaded."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from bayeszip.data import cifar10, load, load_test, load_training, published
from bayeszip.data.splits import split_rows
from bayeszip.errors import DataError

INNER = "cifar-10-batches-bin"
TRAINING = [f"data_batch_{number}.bin" for number in range(1, 6)]
NAMES = [*TRAINING, "test_batch.bin"]
RECORD = 3073

#: the first rows of the 50,000 that are set aside for validation, and the sha256 of all as little-endian int64
SPLIT_START = [3, 17, 18, 24, 44, 49, 52, 56]
SPLIT_SHA256 = "33393cadad673c06aaa25365c5890ab0809cd7719ba24bac4dd0122032692517"


def made_up(count: int = 4) -> dict[str, np.ndarray]:
    """Six files of so many random records, as rows of bytes."""
    random = np.random.default_rng(0)
    files = {name: random.integers(0, 256, (count, RECORD), dtype=np.uint8) for name in NAMES}
    for records in files.values():
        records[:, 0] %= 10
    return files


def archive_of(files: dict[str, bytes], folder: str = INNER) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in {"readme.html": b"<html>", **files}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def files() -> dict[str, bytes]:
    return {name: records.tobytes() for name, records in made_up().items()}


def write(folder: Path, files: dict[str, bytes], form: str) -> Path:
    """Write the files in one of the forms a folder may have; what to name after `cifar10:`."""
    folder.mkdir(parents=True)
    if form in ("archive", "archive itself"):
        (folder / cifar10.ARCHIVE).write_bytes(archive_of(files))
        return folder if form == "archive" else folder / cifar10.ARCHIVE
    inner = folder / INNER if form == "inner folder" else folder
    inner.mkdir(exist_ok=True)
    for name, content in files.items():
        (inner / name).write_bytes(content)
    return folder


FORMS = ["files", "inner folder", "archive", "archive itself"]


class TestReading:
    @pytest.mark.parametrize("form", FORMS)
    def test_every_record_arrives_with_its_label(self, tmp_path, files, form):
        dataset = load(f"cifar10:{write(tmp_path / 'set', files, form)}")
        assert [len(split) for split in (dataset.train, dataset.validation, dataset.test)] == [18, 2, 4]
        published_rows = np.concatenate([made_up()[name] for name in TRAINING])
        rows = split_rows(20, 10)
        for split, records in [
            (dataset.train, published_rows[rows[0]]),
            (dataset.validation, published_rows[rows[1]]),
            (dataset.test, made_up()["test_batch.bin"]),
        ]:
            assert split.images.shape == (len(records), 3, 32, 32)
            assert (split.images.dtype, split.labels.dtype) == (torch.float32, torch.int64)
            assert split.images.is_contiguous()
            assert split.labels.tolist() == records[:, 0].tolist()
            pixels = split.images.double() * torch.tensor(cifar10.STD).reshape(3, 1, 1)
            pixels = (pixels + torch.tensor(cifar10.MEAN).reshape(3, 1, 1)) * 255
            assert torch.equal(pixels.round().byte().reshape(len(records), -1), torch.from_numpy(records[:, 1:]))
            assert (pixels - pixels.round()).abs().max() < 1e-4

    def test_a_record_by_hand(self, tmp_path):
        """Label 7; red 255 but for its second row, 0; green 51; blue 102."""
        red = b"\xff" * 32 + b"\0" * 32 + b"\xff" * 960
        record = b"\7" + red + b"\x33" * 1024 + b"\x66" * 1024
        folder = write(tmp_path / "set", dict.fromkeys(NAMES, record), "files")
        test = load_test(f"cifar10:{folder}")
        assert test.labels.tolist() == [7]
        for channel, row, value in [(0, 0, 1.0), (0, 1, 0.0), (0, 2, 1.0), (1, 5, 0.2), (2, 31, 0.4)]:
            expected = (value - cifar10.MEAN[channel]) / cifar10.STD[channel]
            assert test.images[0, channel, row].tolist() == pytest.approx([expected] * 32, abs=1e-6)

    def test_the_validation_split_never_changes(self):
        """Accuracies of different versions are comparable only while this holds."""
        train, validation = split_rows(50_000, cifar10.VALIDATION_ONE_IN)
        assert np.array_equal(np.sort(np.concatenate([train, validation])), np.arange(50_000))
        assert len(validation) == 5_000
        assert validation[:8].tolist() == SPLIT_START
        assert hashlib.sha256(validation.astype("<i8").tobytes()).hexdigest() == SPLIT_SHA256

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("damage", ["missing", "cut", "label"])
    def test_the_test_set_is_neither_opened_nor_missed_by_training(self, tmp_path, files, form, damage):
        files["test_batch.bin"] = {"missing": b"", "cut": b"x" * 100, "label": b"\xff" * RECORD}[damage]
        if damage == "missing":
            del files["test_batch.bin"]
        spec = f"cifar10:{write(tmp_path / 'set', files, form)}"
        train, validation = load_training(spec)
        assert (len(train), len(validation)) == (18, 2)
        with pytest.raises(DataError, match=r"test_batch\.bin"):
            load_test(spec)

    def test_each_part_opens_its_own_files_alone(self, tmp_path, files, monkeypatch):
        folder = write(tmp_path / "set", files, "files")
        opened = []
        monkeypatch.setattr(cifar10, "read_file", lambda path: opened.append(path.name) or path.read_bytes())
        load_training(f"cifar10:{folder}")
        assert opened == TRAINING
        opened.clear()
        load_test(f"cifar10:{folder}")
        assert opened == ["test_batch.bin"]


class TestFaults:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "has 0 bytes; a file of CIFAR-10 holds whole records of 3,073"),
            (bytes(RECORD - 1), "has 3,072 bytes"),
            (bytes(3 * RECORD + 1), "has 9,220 bytes"),
            (bytes(2 * RECORD) + b"\x0a" + bytes(RECORD - 1), "has the label 10 in record 2; .* labels are 0 to 9"),
        ],
    )
    def test_files_of_the_wrong_form_are_named(self, tmp_path, files, form, content, message):
        files["data_batch_3.bin"] = content
        with pytest.raises(DataError, match=rf"data_batch_3\.bin {message}"):
            load(f"cifar10:{write(tmp_path / 'set', files, form)}")

    @pytest.mark.parametrize("form", FORMS)
    def test_missing_files_are_named(self, tmp_path, files, form):
        del files["data_batch_2.bin"], files["data_batch_5.bin"]
        with pytest.raises(DataError, match=r"lacks data_batch_2\.bin, data_batch_5\.bin$"):
            load(f"cifar10:{write(tmp_path / 'set', files, form)}")

    def test_an_empty_or_missing_folder(self, tmp_path):
        with pytest.raises(
            DataError, match=r"holds neither cifar-10-binary\.tar\.gz nor data_batch_1\.bin, .*_5\.bin$"
        ):
            load(f"cifar10:{tmp_path}")
        with pytest.raises(DataError, match=r"nowhere does not exist; give a folder with cifar-10-binary\.tar\.gz"):
            load(f"cifar10:{tmp_path / 'nowhere'}")

    @pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py"])
    def test_the_pickled_version_is_not_read(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match="the Python version, whose pickles are not read: get the binary version"):
            load(f"cifar10:{tmp_path}")

    def test_a_record_a_file_is_enough(self, tmp_path, files):
        folder = write(tmp_path / "set", {name: content[:RECORD] for name, content in files.items()}, "files")
        assert [len(split) for split in load_training(f"cifar10:{folder}")] == [4, 1]

    def test_damaged_archives_are_named(self, tmp_path, files):
        whole = archive_of(files)
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        path = tmp_path / cifar10.ARCHIVE
        for content in (b"", b"<html>log in", whole[:-1], whole[:5000], flipped, gzip.compress(b"no archive" * 99)):
            path.write_bytes(content)
            with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz: (not a sound|the archive lacks)"):
                load_training(f"cifar10:{tmp_path}")

    def test_a_file_that_is_no_archive_is_refused(self, tmp_path, files):
        path = write(tmp_path / "set", files, "files") / "data_batch_1.bin"
        with pytest.raises(DataError, match=r"not a sound \.tar\.gz archive"):
            load(f"cifar10:{path}")

    def test_links_and_folders_in_an_archive_are_not_followed(self, tmp_path, files):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, kind in (("data_batch_1.bin", tarfile.SYMTYPE), ("data_batch_2.bin", tarfile.DIRTYPE)):
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, "/etc/passwd"
                archive.addfile(member)
        (tmp_path / cifar10.ARCHIVE).write_bytes(buffer.getvalue())
        with pytest.raises(DataError, match=r"lacks data_batch_1\.bin, data_batch_2\.bin"):
            load(f"cifar10:{tmp_path}")

    def test_a_member_that_claims_too_much_is_refused_before_it_is_read(self, tmp_path, files, monkeypatch):
        monkeypatch.setattr(cifar10, "_MAX_BYTES", RECORD)
        write(tmp_path / "set", files, "archive")
        with pytest.raises(DataError, match=r"data_batch_1\.bin claims 12,292 bytes; 3,073 are allowed"):
            load(f"cifar10:{tmp_path / 'set'}")

    def test_nothing_is_written(self, tmp_path, files):
        folder = write(tmp_path / "set", {**files, "../../outside.bin": b"x"}, "archive")
        load(f"cifar10:{folder}")
        assert [path.name for path in tmp_path.rglob("*")] == ["set", cifar10.ARCHIVE]


@pytest.fixture
def home(tmp_path, files, monkeypatch) -> Path:
    """A folder that stands for the place where CIFAR-10 is published; the machine has an empty cache."""
    content = archive_of(files)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / cifar10.ARCHIVE).write_bytes(content)
    monkeypatch.setitem(cifar10.SHA256, cifar10.ARCHIVE, hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(published, "_checkout", lambda: tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("BAYESZIP_DATA", raising=False)
    return tmp_path / "home"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache" / "bayeszip" / "cifar10"


class TestPublished:
    def test_downloaded_once_unpacked_and_then_from_the_cache(self, home, cache, files):
        assert len(load("cifar10", mirrors=[home.as_uri()]).train) == 18
        assert {path.name: path.read_bytes() for path in cache.iterdir()} == files
        (home / cifar10.ARCHIVE).unlink()
        dataset = load("cifar10", mirrors=[home.as_uri()])
        assert (len(dataset.train), dataset.name) == (18, "cifar10")

    def test_only_the_published_archive_is_kept(self, home, cache, files):
        other = archive_of({**files, "data_batch_1.bin": bytes(RECORD)})
        (home / cifar10.ARCHIVE).write_bytes(other)
        sums = f"sha256 is {hashlib.sha256(other).hexdigest()}, not {cifar10.SHA256[cifar10.ARCHIVE]}"
        with pytest.raises(DataError, match=f"CIFAR-10 could not be downloaded:.*\n?.*wrong checksum: {sums}"):
            load("cifar10", mirrors=[home.as_uri()])
        assert list(cache.iterdir()) == []

    def test_offline_says_what_to_do(self, home, cache):
        with pytest.raises(DataError) as caught:
            load("cifar10", mirrors=[(home / "nowhere").as_uri()])
        message = str(caught.value)
        assert message.startswith("CIFAR-10 could not be downloaded:\n")
        assert f"Put cifar-10-binary.tar.gz into {cache}, or into any folder and name it in" in message

    @pytest.mark.parametrize("form", ["files", "inner folder", "archive"])
    def test_files_put_into_the_cache_by_hand(self, home, cache, files, form):
        write(cache, files, form)
        assert len(load("cifar10", mirrors=[]).test) == 4

    @pytest.mark.parametrize("inner", ["", "cifar10"])
    @pytest.mark.parametrize("form", ["files", "archive"])
    def test_the_environment_variable_goes_first(self, home, tmp_path, files, monkeypatch, inner, form):
        write(tmp_path / "mine" / inner, files, form)
        monkeypatch.setenv("BAYESZIP_DATA", str(tmp_path / "mine"))
        assert len(load("cifar10", mirrors=[]).test) == 4

    def test_an_environment_variable_that_leads_nowhere_is_told(self, home, tmp_path, monkeypatch):
        monkeypatch.setenv("BAYESZIP_DATA", str(tmp_path))
        with pytest.raises(DataError, match=r"lacks CIFAR-10; put cifar-10-binary\.tar\.gz there \(or the \.bin files"):
            load("cifar10", mirrors=[home.as_uri()])

    def test_a_cache_that_went_bad_is_told(self, home, cache, files):
        load("cifar10", mirrors=[home.as_uri()])
        (cache / "test_batch.bin").write_bytes(b"")
        assert len(load_training("cifar10")[0]) == 18
        with pytest.raises(DataError, match=r"test_batch\.bin .*; delete .*cifar10, and CIFAR-10 is downloaded again"):
            load_test("cifar10")
