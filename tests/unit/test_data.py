"""The datasets that the package brings along; CIFAR-10 from small files in its true binary format."""

import io
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import URLError

import pytest
import torch
from sklearn.datasets import load_digits

from pipeline.data import cifar, cifar10, digits, handwriting
from pipeline.data.text import VOCABULARY_SIZE, characters
from pipeline.errors import ExperimentError

FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def text_of(tokens):
    return "".join(map(chr, tokens.tolist()))


class Answer(io.BytesIO):
    """Of a server that doesn't say how much will come."""

    length = None


class TestDigits:
    def test_has_all_scans_in_stated_types(self):
        train, validation = digits()

        assert len(train) + len(validation) == 1797
        assert len(validation) == 359
        image, label = train[0]
        assert (image.shape, image.dtype) == ((1, 8, 8), torch.float32)
        assert (label.shape, label.dtype) == ((), torch.int64)

    def test_they_are_those_of_scikit_learn(self):
        """Which is asked where its file lies, and not imported."""
        pixels, labels = load_digits(return_X_y=True)
        images, own = handwriting._load()

        assert torch.equal(images.flatten(1), torch.from_numpy(pixels).float() / 16)
        assert torch.equal(own, torch.from_numpy(labels))

    def test_is_standardized_over_the_training_set(self):
        images, _ = digits().train.tensors

        assert images.mean().item() == pytest.approx(0, abs=1e-5)
        assert images.std().item() == pytest.approx(1, abs=1e-5)

    def test_each_digit_has_its_share_of_both_parts(self):
        train, validation = digits(validation_fraction=0.2)
        trained, validated = (split.tensors[1].bincount() for split in (train, validation))

        assert ((validated / (trained + validated) - 0.2).abs() < 0.005).all()

    def test_same_seed_same_split(self):
        first, second, other = digits(seed=1), digits(seed=1), digits(seed=2)

        assert all(map(torch.equal, first.validation.tensors, second.validation.tensors))
        assert not torch.equal(first.validation.tensors[0], other.validation.tensors[0])

    def test_split_leaves_the_global_random_state_alone(self):
        before = torch.get_rng_state()
        digits()

        assert torch.equal(torch.get_rng_state(), before)

    def test_no_sample_is_in_both_parts(self):
        train, validation = (split.tensors[0].flatten(1) for split in digits())

        assert torch.cdist(validation, train).min() > 0

    def test_enlarges_and_repeats_channels(self):
        small, large = digits().train.tensors[0], digits(image_size=32, channels=3).train.tensors[0]

        assert large.shape[1:] == (3, 32, 32)
        assert torch.equal(large[:, 0], large[:, 2])
        torch.testing.assert_close(large[:, :1].mean((2, 3)), small.mean((2, 3)), atol=0.02, rtol=0)

    def test_without_validation(self):
        train, validation = digits(validation_fraction=0)

        assert len(train) == 1797
        assert validation is None

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"validation_fraction": 1.0}, r"data\.validation_fraction: is 1\.0; write a number from 0"),
            ({"validation_fraction": -0.1}, r"data\.validation_fraction: is -0\.1; write a number from 0"),
            ({"image_size": 0}, r"data: 1 x 0 x 0 is not an image size"),
        ],
    )
    def test_impossible_arguments_are_refused(self, arguments, message):
        with pytest.raises(ExperimentError, match=message):
            digits(**arguments)


class TestCharacters:
    def test_targets_are_the_next_tokens(self, tmp_path):
        source = tmp_path / "text.txt"
        source.write_text("abcdefghijk", encoding="utf-8")
        train, validation = characters(context_length=4, source=str(source), validation_fraction=0)

        assert [(text_of(tokens), text_of(following)) for tokens, following in map(train.__getitem__, range(2))] == [
            ("abcd", "bcde"),
            ("efgh", "fghi"),
        ]
        assert len(train) == 2
        assert validation is None

    def test_validation_is_the_end_of_the_text(self, tmp_path):
        source = tmp_path / "text.txt"
        source.write_text("a" * 75 + "b" * 25, encoding="utf-8")
        train, validation = characters(context_length=5, source=str(source), validation_fraction=0.25)

        assert text_of(train.tensors[0].unique()) == "a"
        assert text_of(validation.tensors[0].unique()) == "b"

    def test_other_characters_become_question_marks(self, tmp_path):
        source = tmp_path / "text.txt"
        source.write_text("na\u00efve \u2026", encoding="utf-8")
        train, _ = characters(context_length=6, source=str(source), validation_fraction=0)

        assert text_of(train[0][0]) == "na?ve "
        assert text_of(train[0][1]) == "a?ve ?"

    def test_pythons_own_text_is_sizeable_and_fits_the_vocabulary(self):
        train, validation = characters()
        tokens, following = train[0]

        assert tokens.shape == following.shape == (64,)
        assert tokens.dtype == following.dtype == torch.int64
        assert len(train) > 4000
        assert len(validation) > 400
        assert train.tensors[0].max() < VOCABULARY_SIZE
        assert "Python" in text_of(train.tensors[0].flatten())

    def test_max_characters_shortens_the_text(self):
        train, validation = characters(context_length=10, max_characters=1001, validation_fraction=0.5)

        assert (len(train), len(validation)) == (50, 49)

    def test_windows_longer_than_the_text_are_refused(self):
        with pytest.raises(ExperimentError, match=r"data\.context_length: is 64, but the text has 64 characters"):
            characters(max_characters=64, validation_fraction=0)

    def test_missing_source_is_named(self, tmp_path):
        with pytest.raises(ExperimentError, match=r"data\.source: can't read .*nowhere\.txt as UTF-8"):
            characters(source=str(tmp_path / "nowhere.txt"))


def record(label, *, red=0, green=0, blue=0):
    """One CIFAR-10 record with even colours."""
    return bytes([label]) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


def standardized(red, green, blue):
    values = zip((red, green, blue), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), strict=True)
    return torch.tensor([(value / 255 - mean) / deviation for value, mean, deviation in values])


@pytest.fixture
def folder(tmp_path):
    """Six files of two records each; labels tell them apart."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for index, name in enumerate(FILES):
        (folder / name).write_bytes(record(index) + record(9, red=255))
    return folder


class TestCifar10:
    def test_reads_all_files_in_order(self, folder):
        train, validation = cifar10(directory=str(folder.parent), augment=False)

        assert [int(train[index][1]) for index in range(len(train))] == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
        assert [int(validation[index][1]) for index in range(len(validation))] == [5, 9]
        assert train[0][1].dtype == torch.int64

    def test_channels_are_red_green_blue(self, folder):
        (folder / FILES[0]).write_bytes(record(3, red=200, green=100, blue=50))
        image, _ = cifar10(directory=str(folder.parent), augment=False).train[0]

        assert (image.shape, image.dtype) == ((3, 32, 32), torch.float32)
        torch.testing.assert_close(image[:, 0, 0], standardized(200, 100, 50))
        torch.testing.assert_close(image[:, 31, 31], standardized(200, 100, 50))

    def test_pixels_land_row_by_row(self, folder):
        content = bytearray(record(0))
        content[1 + 1024 + 32 * 5 + 7] = 255  # green, row 5, column 7
        (folder / FILES[0]).write_bytes(content)
        image, _ = cifar10(directory=str(folder.parent), augment=False).train[0]

        assert (image > standardized(1, 1, 1).view(3, 1, 1)).nonzero().tolist() == [[1, 5, 7]]

    def test_augmentation_follows_the_global_random_generator(self, folder):
        (folder / FILES[0]).write_bytes(bytes([1]) + bytes(range(256)) * 12)
        train = cifar10(directory=str(folder.parent)).train

        def draw(seed):
            torch.manual_seed(seed)
            return train[0][0]

        assert torch.equal(draw(1), draw(1))
        assert len({draw(seed).numpy().tobytes() for seed in range(20)}) > 10
        assert draw(1).shape == (3, 32, 32)

    def test_augmentation_shifts_by_at_most_four_and_flips(self, folder):
        content = bytearray(record(0))
        content[1 + 32 * 16 + 10] = 255  # red, row 16, column 10
        (folder / FILES[0]).write_bytes(content)
        train = cifar10(directory=str(folder.parent)).train
        torch.manual_seed(0)
        spots = [divmod(int(train[0][0][0].argmax()), 32) for _ in range(500)]

        assert {row for row, _ in spots} == set(range(12, 21))
        assert {column for _, column in spots} == set(range(6, 15)) | set(range(31 - 14, 31 - 5))

    def test_validation_is_never_augmented(self, folder):
        validation = cifar10(directory=str(folder.parent)).validation

        assert all(torch.equal(validation[1][0], validation[1][0]) for _ in range(10))

    def test_missing_files_without_download_say_what_to_fetch(self, tmp_path):
        with pytest.raises(ExperimentError) as caught:
            cifar10(directory=str(tmp_path), download=False)

        (problem,) = caught.value.problems
        assert problem.key == "data"
        assert "cifar-10-batches-bin is missing, and download is false" in problem.message
        assert f"fetch {cifar.ADDRESS} and unpack it in {tmp_path}" in problem.message

    def test_no_network_says_what_to_fetch_and_leaves_nothing_behind(self, tmp_path, monkeypatch):
        def refuse(address, timeout):
            raise URLError("Name or service not known")

        monkeypatch.setattr(cifar, "urlopen", refuse)
        with pytest.raises(ExperimentError, match=r"data: CIFAR-10 can't be downloaded .*Name or.* fetch https"):
            cifar10(directory=str(tmp_path))

        assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []

    def test_another_archive_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cifar, "urlopen", lambda address, timeout: Answer(b"<html>Sorry</html>"))
        with pytest.raises(ExperimentError, match=r"MD5 [0-9a-f]{32}, expected c32a1d4a"):
            cifar10(directory=str(tmp_path))

        assert not (tmp_path / "cifar-10-batches-bin").exists()

    def test_ranks_of_one_machine_download_once(self, folder, tmp_path, monkeypatch):
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            tar.add(folder, arcname="cifar-10-batches-bin")
        served = []

        def serve(address, timeout):
            served.append(address)
            time.sleep(0.1)  # long enough for the others to start fetching as well, if nothing held them back
            return Answer(archive.getvalue())

        monkeypatch.setattr(cifar, "urlopen", serve)
        monkeypatch.setattr(cifar, "_check", lambda archive: None)  # the real MD5 needs the real 170 MB
        target = tmp_path / "new" / "data"
        with ThreadPoolExecutor(4) as pool:
            sizes = [len(splits.train) for splits in pool.map(lambda _: cifar10(directory=str(target)), range(4))]

        assert sizes == [10] * 4
        assert served == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]
        assert sorted(path.name for path in (target / "cifar-10-batches-bin").iterdir()) == FILES

    @pytest.mark.parametrize("size", [0, 1, 3072, 2 * 3073 - 1])
    def test_truncated_file_is_named_with_its_size(self, folder, size):
        (folder / "data_batch_3.bin").write_bytes(bytes(size))
        message = rf"data_batch_3\.bin holds {size} bytes, expected a multiple of 3073; remove the folder and fetch"
        with pytest.raises(ExperimentError, match=message):
            cifar10(directory=str(folder.parent))

    def test_absent_file_is_named(self, folder):
        (folder / "test_batch.bin").unlink()
        with pytest.raises(ExperimentError, match=r"can't read .*test_batch\.bin \(No such file or directory\); fetch"):
            cifar10(directory=str(folder.parent))

    def test_other_content_is_refused(self, folder):
        (folder / "data_batch_1.bin").write_bytes(record(10))
        with pytest.raises(ExperimentError, match=r"data_batch_1\.bin holds label 10, expected 0 to 9"):
            cifar10(directory=str(folder.parent))
