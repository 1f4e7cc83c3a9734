"""IDX files sound and broken, MNIST found or fetched, the validation split, and batches."""

import gzip
import hashlib
import http.server
import lzma
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bayeszip import data
from bayeszip.data import Dataset, load, load_test, load_training, mnist, published, read_idx
from bayeszip.data.splits import split_rows
from bayeszip.errors import DataError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
NAMES = tuple(mnist.SHA256)
PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}

#: the first rows of the 60,000 that are set aside for validation, and the sha256 of all as little-endian int64
SPLIT_START = [3, 18, 24, 44, 49, 52, 56, 95]
SPLIT_SHA256 = "a4f601bd10f34cd308bab50ae6cbb8a4604b432f6493a0c3861649b61605ac97"


def idx_bytes(array: np.ndarray) -> bytes:
    code = CODES[array.dtype.str[1:]]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def image_set(n: int, size: tuple[int, ...] = (28, 28), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (n, *size), dtype=np.uint8), random.integers(0, 10, n, dtype=np.uint8)


def write_folder(folder: Path, *, n: int = 24, size: tuple[int, ...] = (28, 28), suffix: str = "") -> Path:
    """The four files, of random images, under MNIST's names."""
    folder.mkdir(exist_ok=True)
    compress = PACKERS[suffix]
    for part, count in (("train", n), ("t10k", 7)):
        images, labels = image_set(count, size, seed=count)
        (folder / f"{part}-images-idx3-ubyte{suffix}").write_bytes(compress(idx_bytes(images)))
        (folder / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(compress(idx_bytes(labels)))
    return folder


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load("mnist")


class TestReadIdx:
    @settings(deadline=None, max_examples=60)
    @given(
        array=hnp.arrays(
            st.sampled_from(sorted(CODES)).map(np.dtype), hnp.array_shapes(max_dims=4, min_side=0, max_side=5)
        ),
        suffix=st.sampled_from(["", ".gz", ".xz"]),
    )
    def test_every_type_shape_and_compression(self, tmp_path_factory, array, suffix):
        path = tmp_path_factory.mktemp("idx") / f"array{suffix}"
        compress = PACKERS[suffix]
        path.write_bytes(compress(idx_bytes(array)))
        read = read_idx(path)
        assert read.dtype == array.dtype
        assert read.dtype.isnative
        assert read.shape == array.shape
        assert read.tobytes() == array.tobytes()  # NaN and −0.0 included

    def test_bytes_by_hand(self, tmp_path):
        path = tmp_path / "numbers"
        path.write_bytes(bytes.fromhex("00 00 0b 02  00 00 00 01  00 00 00 03  00 01  ff fe  7f ff"))
        assert read_idx(str(path)).tolist() == [[1, -2, 32767]]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is truncated: 0 bytes, too few for an IDX header"),
            (b"\0\0\x08", "is truncated: 3 bytes"),
            (b"\x89PNG\r\n", "is not an IDX file: it starts with 89 50 4e 47, not with 00 00"),
            (b"\0\1\x08\1\0\0\0\0", "is not an IDX file: it starts with 00 01 08 01"),
            (
                gzip.compress(b"x", mtime=0),
                r"is not an IDX file: .* as a compressed file does; let its name end in \.gz",
            ),
            (lzma.compress(b"x"), r"is not an IDX file: .* let its name end in \.xz"),
            (b"\0\0\x0a\1\0\0\0\0", "has the unknown IDX type code 0x0a; known are 0x08, 0x09, 0x0b"),
            (b"\0\0\x08\0\0", "claims 0 dimensions; 1 to 8 are allowed"),
            (b"\0\0\x08\xff" + bytes(4 * 255), "claims 255 dimensions"),
            (b"\0\0\x08\2\0\0\0\1\0\0", "is truncated: its header of 12 bytes ends after 10"),
            (b"\0\0\x08\1\0\0\0\3ab", "is truncated: its header promises 3 values of 1 bytes, 3 bytes, and 2 follow"),
            (b"\0\0\x0e\1\0\0\0\1abcdefg", "promises 1 values of 8 bytes, 8 bytes, and 7 follow"),
            (b"\0\0\x08\1\0\0\0\3abcd", "is too long: .* 3 bytes, and more follow"),
            (b"\0\0\x08\1\0\0\0\0a", "is too long: .* 0 bytes, and more follow"),
            (b"\0\0\x0e\3" + b"\xff" * 12, "is too large: its header promises 4294967295 × 4294967295 × 4294967295"),
        ],
    )
    def test_broken_content_is_named(self, tmp_path, content, message):
        path = tmp_path / "train-images"
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            read_idx(path)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("suffix", [".gz", ".xz"])
    def test_broken_compression_is_named(self, tmp_path, suffix):
        compress = {".gz": gzip.compress, ".xz": lzma.compress}[suffix]
        whole = compress(idx_bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)))
        path = tmp_path / f"labels{suffix}"
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for content in (b"plain text", idx_bytes(np.zeros(3, np.uint8)), whole[:-1], whole[:100], flipped):
            path.write_bytes(content)
            with pytest.raises(DataError, match=rf"labels\{suffix} (is not a sound|is truncated)"):
                read_idx(path)

    @pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
    def test_every_prefix_is_refused(self, tmp_path, suffix):
        whole = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](idx_bytes(image_set(2, (3, 4))[0]))
        path = tmp_path / f"images{suffix}"
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(DataError):
                read_idx(path)

    def test_missing_file_and_folder(self, tmp_path):
        with pytest.raises(DataError, match="nowhere does not exist"):
            read_idx(tmp_path / "nowhere")
        with pytest.raises(DataError, match="can't be read: Is a directory"):
            read_idx(tmp_path)

    def test_memory_follows_the_content_not_the_header(self, tmp_path):
        """A header that promises 4 GiB over 100 bytes is refused by a process that may not have that much."""
        path = tmp_path / "huge"
        path.write_bytes(b"\0\0\x08\1\xff\xff\xff\xff" + bytes(100))
        script = (
            "import resource, sys, bayeszip.data as data\n"
            "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))\n"
            "try: data.read_idx(sys.argv[1])\n"
            "except data.DataError as error: print(error)\n"
        )
        if not Path("/proc/self/statm").exists():
            pytest.skip("needs Linux to limit memory")
        run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        assert "4,294,967,295 bytes, and 100 follow" in run.stdout


class TestFolders:
    @pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
    def test_content_arrives_scaled_and_split(self, tmp_path, suffix):
        dataset = load(f"idx:{write_folder(tmp_path / 'set', suffix=suffix)}")
        images, labels = image_set(24, seed=24)
        assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (22, 2, 7)
        for split in (dataset.train, dataset.validation, dataset.test):
            assert split.images.shape == (len(split), 1, 28, 28)
            assert (split.images.dtype, split.labels.dtype) == (torch.float32, torch.int64)
            assert split.images.is_contiguous()
        test_images, test_labels = image_set(7, seed=7)
        assert torch.equal(dataset.test.images[:, 0], torch.from_numpy(test_images).float() / 255)
        assert dataset.test.labels.tolist() == test_labels.tolist()
        # Each published example is in exactly one split, with its own label.
        published = sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))
        found = sorted(
            ((split.images[row, 0] * 255).round().byte().numpy().tobytes(), int(split.labels[row]))
            for split in (dataset.train, dataset.validation)
            for row in range(len(split))
        )
        assert found == published
        assert dataset.name == f"idx:{tmp_path / 'set'}"
        assert dataset.classes == 10

    @pytest.mark.parametrize("size", [(32, 32), (5, 9), (3, 8, 8)])
    def test_other_image_sizes(self, tmp_path, size):
        dataset = load(f"idx:{write_folder(tmp_path / 'set', size=size)}")
        assert dataset.train.images.shape[1:] == (size if len(size) == 3 else (1, *size))

    @pytest.mark.parametrize(
        "names",
        [
            ("train-images.idx3-ubyte", "train-labels.idx1-ubyte", "t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte"),
            ("emnist-train-images-idx3-ubyte", "emnist-train-labels", "emnist-test-images", "emnist-test-labels"),
            ("Train_Images.idx", "Train_Labels.idx", "Test_Images.idx", "Test_Labels.idx"),
        ],
    )
    def test_other_names(self, tmp_path, names):
        folder = write_folder(tmp_path / "set")
        for old, new in zip(NAMES, names, strict=True):
            (folder / old).rename(folder / new)
        (folder / "README.md").write_text("about the images")
        assert len(load(f"idx:{folder}").test) == 7

    def test_the_usual_name_goes_before_others_that_fit(self, tmp_path):
        folder = write_folder(tmp_path / "set")
        (folder / "extra-train-images").write_bytes(b"not these")
        assert len(load(f"idx:{folder}").train) == 22

    def test_one_file_in_two_compressions_is_no_contradiction(self, tmp_path):
        folder = write_folder(write_folder(tmp_path / "set"), suffix=".xz")
        assert len(load(f"idx:{folder}").train) == 22

    def test_several_candidates_are_listed(self, tmp_path):
        folder = write_folder(tmp_path / "set")
        (folder / "train-images-idx3-ubyte").rename(folder / "a-train-images")
        (folder / "b-train-images.gz").write_bytes(b"")
        with pytest.raises(DataError, match=r"could be the train-images: a-train-images, b-train-images\.gz; keep one"):
            load(f"idx:{folder}")

    @pytest.mark.parametrize("missing", NAMES)
    def test_a_missing_file_is_named(self, tmp_path, missing):
        folder = write_folder(tmp_path / "set")
        (folder / missing).unlink()
        with pytest.raises(DataError, match=rf"set lacks {missing} \(or \.gz, \.xz\)$"):
            load(f"idx:{folder}")

    def test_all_missing_files_are_named(self, tmp_path):
        with pytest.raises(DataError, match=r"lacks train-images.*train-labels"):
            load_training(f"idx:{tmp_path}")
        with pytest.raises(DataError, match=r"lacks t10k-images.*t10k-labels"):
            load_test(f"idx:{tmp_path}")

    @pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"damaged")])
    @pytest.mark.parametrize(
        ("damaged", "unharmed", "harmed"), [("t10k", load_training, load_test), ("train", load_test, load_training)]
    )
    def test_each_part_opens_its_own_files_alone(self, tmp_path, damage, damaged, unharmed, harmed):
        folder = write_folder(tmp_path / "set")
        for path in folder.glob(f"{damaged}-*"):
            damage(path)
        read = unharmed(f"idx:{folder}")
        assert [len(split) for split in (read if isinstance(read, tuple) else (read,))] in ([22, 2], [7])
        with pytest.raises(DataError, match=f"{damaged}-images"):
            harmed(f"idx:{folder}")

    def test_parts_alone_are_those_of_the_whole(self, tmp_path):
        spec = f"idx:{write_folder(tmp_path / 'set')}"
        whole, (train, validation), test = load(spec), load_training(spec), load_test(spec)
        for alone, part in ((train, whole.train), (validation, whole.validation), (test, whole.test)):
            assert torch.equal(alone.images, part.images)
            assert torch.equal(alone.labels, part.labels)

    def test_a_missing_folder_is_named(self, tmp_path):
        with pytest.raises(DataError, match=r"nowhere can't be read as a folder of IDX files: No such file"):
            load(f"idx:{tmp_path / 'nowhere'}")

    @pytest.mark.parametrize(
        ("name", "array", "message"),
        [
            (
                "train-labels-idx1-ubyte",
                np.zeros(23, "u1"),
                "train-images-.* holds 24 images, but .* 23 labels",
            ),
            ("t10k-images-idx3-ubyte", np.zeros((8, 28, 28), "u1"), "t10k-images-.* 8 images, but .*t10k-labels.* 7"),
            (
                "t10k-images-idx3-ubyte",
                np.zeros((7, 28, 27), "u1"),
                r"sizes, \(1, 28, 28\) and \(1, 28, 27\)",
            ),
            ("train-images-idx3-ubyte", np.zeros((24, 784), "u1"), r"train-images-.* has shape \(24, 784\)"),
            ("train-images-idx3-ubyte", np.zeros((24, 28, 0), "u1"), "train-images-.* holds no images"),
            ("train-images-idx3-ubyte", np.zeros((24, 28, 28), "i4"), "train-images-.* holds int32; images are"),
            ("train-images-idx3-ubyte", np.full((24, 28, 28), 2.0, "f4"), r"train-images-.* floats in \[2, 2\]"),
            ("train-images-idx3-ubyte", np.full((24, 28, 28), np.nan, "f4"), r"train-images-.* floats in \[nan, nan\]"),
            ("train-labels-idx1-ubyte", np.zeros(24, "f4"), "train-labels-.* holds float32 of shape .*integers"),
            ("train-labels-idx1-ubyte", np.zeros((24, 1), "u1"), r"train-labels-.* shape \(24, 1\)"),
            ("train-labels-idx1-ubyte", np.full(24, -3, "i1"), "train-labels-.* holds the negative label -3"),
        ],
    )
    def test_files_that_do_not_fit_are_named(self, tmp_path, name, array, message):
        folder = write_folder(tmp_path / "set")
        (folder / name).write_bytes(idx_bytes(array))
        with pytest.raises(DataError, match=message):
            load(f"idx:{folder}")

    def test_one_image_is_too_few_and_two_are_enough(self, tmp_path):
        with pytest.raises(DataError, match=r"train-images-.* holds one image"):
            load(f"idx:{write_folder(tmp_path / 'one', n=1)}")
        dataset = load(f"idx:{write_folder(tmp_path / 'two', n=2)}")
        assert (len(dataset.train), len(dataset.validation)) == (1, 1)

    def test_floats_in_the_unit_range_stay_as_they_are(self, tmp_path):
        folder = write_folder(tmp_path / "set")
        images = np.random.default_rng(0).random((7, 28, 28))
        (folder / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(images))
        assert torch.equal(load(f"idx:{folder}").test.images[:, 0], torch.from_numpy(images).float())

    @pytest.mark.parametrize("spec", ["", "cifar", "idx", "MNIST", "folder:x", "idx:", "cifar10:", "mnist:x"])
    def test_an_unknown_specification(self, spec):
        for reader in (load, load_training, load_test):
            with pytest.raises(DataError, match=r"give mnist, cifar10, .* or idx:FOLDER|(idx|cifar10): needs a folder"):
                reader(spec)

    @pytest.mark.parametrize(
        ("spec", "known"),
        [
            ("mnist", True),
            ("cifar10", True),
            ("cifar10:some/folder", True),
            ("idx:some/folder", True),
            ("idx:", True),
            ("idx", False),
            ("mnist:x", False),
            ("my_data:loaders", False),
            ("", False),
        ],
    )
    def test_names_of_data_sets_and_of_other_things(self, spec, known):
        assert data.is_known(spec) is known


class TestMnist:
    def test_sizes_and_range(self, digits):
        assert [len(split) for split in (digits.train, digits.validation, digits.test)] == [55_000, 5_000, 10_000]
        for split in (digits.train, digits.validation, digits.test):
            assert split.images.shape[1:] == (1, 28, 28)
            assert (float(split.images.min()), float(split.images.max())) == (0.0, 1.0)
        assert digits.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
        assert digits.name == "mnist"

    def test_the_validation_split_never_changes(self, digits):
        """Accuracies of different versions are comparable only while this holds."""
        train, validation = split_rows(60_000, 12)
        assert np.array_equal(np.sort(np.concatenate([train, validation])), np.arange(60_000))
        assert validation[:8].tolist() == SPLIT_START
        assert hashlib.sha256(validation.astype("<i8").tobytes()).hexdigest() == SPLIT_SHA256
        # No class is missing or doubled by the draw.
        shares = digits.validation.labels.bincount(minlength=10) / digits.train.labels.bincount(minlength=10)
        assert ((shares - 1 / 11).abs() < 0.02).all()

    def test_bundled_files_are_the_published_ones(self):
        folder = published._checkout() / "data" / "mnist"
        for name, expected in mnist.SHA256.items():
            assert hashlib.sha256(lzma.decompress((folder / f"{name}.xz").read_bytes())).hexdigest() == expected

    @pytest.mark.parametrize("inner", ["", "mnist"])
    def test_the_environment_variable_goes_first(self, tmp_path, monkeypatch, inner):
        write_folder(tmp_path / inner, suffix=".gz")
        monkeypatch.setenv("BAYESZIP_DATA", str(tmp_path))
        assert len(load("mnist").train) == 22

    def test_an_environment_variable_that_leads_nowhere_is_told(self, tmp_path, monkeypatch):
        monkeypatch.setenv("BAYESZIP_DATA", str(tmp_path))
        with pytest.raises(DataError, match=r"BAYESZIP_DATA names .* lacks MNIST; put train-images-.* or unset it"):
            load("mnist")

    @pytest.mark.parametrize(
        ("platform", "environment", "expected"),
        [
            ("linux", {}, "home/.cache/bayeszip"),
            ("darwin", {}, "home/Library/Caches/bayeszip"),
            ("win32", {}, "home/AppData/Local/bayeszip/Cache"),
            ("win32", {"LOCALAPPDATA": "local"}, "local/bayeszip/Cache"),
            ("linux", {"XDG_CACHE_HOME": "caches"}, "caches/bayeszip"),
            ("darwin", {"XDG_CACHE_HOME": "caches"}, "caches/bayeszip"),
        ],
    )
    def test_cache_folder(self, monkeypatch, platform, environment, expected):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(Path, "home", lambda: Path("home"))
        for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert data.cache_folder() == Path(expected)


class Mirror:
    """A web server on this machine that answers as a test tells it."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.requests: list[str] = []
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rsplit("/", 1)[-1]
                mirror.requests.append(name)
                if name not in mirror.answers:
                    self.send_error(404)
                    return
                content = mirror.answers[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if name in mirror.cut else content)

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/mnist/"

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def mirrors(monkeypatch):
    """Two mirrors that serve a small set under MNIST's names, with checksums to match."""
    contents = {}
    for part, count in (("train", 24), ("t10k", 7)):
        images, labels = image_set(count)
        contents[f"{part}-images-idx3-ubyte"] = idx_bytes(images)
        contents[f"{part}-labels-idx1-ubyte"] = idx_bytes(labels)
    for name, content in contents.items():
        monkeypatch.setitem(mnist.SHA256, name, hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = (Mirror(), Mirror())
    for mirror in running:
        mirror.answers = {f"{name}.gz": gzip.compress(content) for name, content in contents.items()}
    yield running
    for mirror in running:
        mirror.stop()


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """As if installed without a checkout around, with an empty cache; the cache's folder for MNIST."""
    monkeypatch.setattr(published, "_checkout", lambda: tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("BAYESZIP_DATA", raising=False)
    return tmp_path / "cache" / "bayeszip" / "mnist"


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class TestDownload:
    GZ = sorted(f"{name}.gz" for name in NAMES)

    def load_from(self, *urls: str) -> Dataset:
        return load("mnist", mirrors=urls)

    def test_once_and_then_from_the_cache(self, mirrors, installed):
        first, second = mirrors
        assert len(self.load_from(first.url, second.url).train) == 22
        assert sorted(path.name for path in installed.iterdir()) == self.GZ
        assert sorted(first.requests) == self.GZ
        assert second.requests == []
        assert len(self.load_from("http://127.0.0.1:1/").train) == 22
        assert sorted(first.requests) == self.GZ

    def test_only_what_is_missing(self, mirrors, installed):
        mirror = mirrors[0]
        self.load_from(mirror.url)
        (installed / self.GZ[2]).unlink()
        mirror.requests.clear()
        self.load_from(mirror.url)
        assert mirror.requests == [self.GZ[2]]

    def test_a_cache_that_went_bad_is_told(self, mirrors, installed):
        self.load_from(mirrors[0].url)
        (installed / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
        with pytest.raises(DataError, match=r"t10k-labels-.*; delete .*mnist, and MNIST is downloaded again"):
            self.load_from(mirrors[0].url)

    def test_the_next_mirror_steps_in(self, mirrors, installed):
        first, second = mirrors
        missing, cut, damaged, wrong = self.GZ
        del first.answers[missing]
        first.cut.add(cut)
        first.answers[damaged] = first.answers[damaged][:-1] + b"\1"
        first.answers[wrong] = gzip.compress(b"another file", mtime=0)
        assert len(self.load_from(first.url, second.url).train) == 22
        assert sorted(second.requests) == self.GZ

    @pytest.mark.parametrize(
        ("break_it", "message"),
        [
            (lambda mirror, name: mirror.answers.pop(name), "the server answers 404 Not Found"),
            (lambda mirror, name: mirror.cut.add(name), r"the connection was cut after [\d,]+ of [\d,]+ bytes"),
            (
                lambda mirror, name: mirror.answers.update({name: gzip.compress(b"x", mtime=0)}),
                f"wrong checksum: .* is {hashlib.sha256(b'x').hexdigest()}, not",
            ),
            (lambda mirror, name: mirror.answers.update({name: b"<html>log in"}), "not a sound gzip file"),
            (lambda mirror, name: mirror.answers.update({name: mirror.answers[name][:-9]}), "not a sound gzip file"),
            (lambda mirror, name: mirror.answers.update({name: b""}), "wrong checksum"),
        ],
    )
    def test_a_bad_answer_is_told_and_not_kept(self, mirrors, installed, break_it, message):
        bad = "t10k-images-idx3-ubyte.gz"
        break_it(mirrors[0], bad)
        with pytest.raises(DataError, match=rf"{bad}: .*{message}"):
            self.load_from(mirrors[0].url)
        assert sorted(path.name for path in installed.iterdir()) == [
            name for name in self.GZ if name.startswith("train")
        ]

    def test_an_endless_answer_is_cut_off(self, mirrors, installed, monkeypatch):
        monkeypatch.setattr(published, "_MAX_DOWNLOAD", 100)
        with pytest.raises(DataError, match="longer than 100 bytes"):
            self.load_from(mirrors[0].url)

    def test_offline_says_what_to_do(self, installed, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        urls = [f"http://127.0.0.1:{closed_port()}/a", f"http://127.0.0.1:{closed_port()}/b/"]
        with pytest.raises(DataError) as caught:
            self.load_from(*urls)
        message = str(caught.value)
        assert message.count("Connection refused") == 2
        assert f"{urls[0]}/train-images-idx3-ubyte.gz" in message
        assert f"{urls[1]}train-images-idx3-ubyte.gz" in message
        for name in NAMES:
            assert f"{name}.gz" in message
        assert f"into {installed}, or into any folder and name it in the environment variable BAYESZIP_DATA" in message

    def test_a_server_that_says_nothing_is_given_up(self, installed, monkeypatch):
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(published, "_TIMEOUT", 0.1)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            with pytest.raises(DataError, match="timed out"):
                self.load_from(f"http://127.0.0.1:{silent.getsockname()[1]}/")

    def test_a_cache_that_can_not_be_written(self, mirrors, installed):
        installed.parent.parent.write_bytes(b"a file where the cache folder should be")
        with pytest.raises(DataError, match=r"can't keep MNIST in .*: Not a directory\. Put .* BAYESZIP_DATA"):
            self.load_from(mirrors[0].url)

    def test_a_full_disk(self, mirrors, installed, monkeypatch):
        def full(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("bayeszip.files.os.write", full)
        with pytest.raises(DataError, match=r"can't keep MNIST in .*the disk is full"):
            self.load_from(mirrors[0].url)
        assert list(installed.iterdir()) == []


def test_a_split_moves_to_a_device_whole(digits):
    moved = digits.test.to("meta")
    assert (moved.images.device.type, moved.labels.device.type) == ("meta", "meta")
    assert len(moved) == 10_000
