"""The datasets that the package brings along."""

import pytest
import torch
from sklearn.datasets import load_digits

from pipeline.data import digits, handwriting
from pipeline.data.text import VOCABULARY_SIZE, characters
from pipeline.errors import ExperimentError


def text_of(tokens):
    return "".join(map(chr, tokens.tolist()))


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
