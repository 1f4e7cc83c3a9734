"""Augmentation as text and as mathematics: what moves where, how often, and the same again from the same state."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from bayeszip.errors import DataError, RecipeError, TrainingError
from bayeszip.fitting.augmentation import Augmentation, augmented

ALL = Augmentation(shift=2, flip=True, rotation=10, scale=0.1, shear=0.1, cutout=3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def impulses(n: int, row: int, column: int, size: tuple[int, int] = (9, 11), channels: int = 1) -> Tensor:
    images = torch.zeros(n, channels, *size)
    images[:, :, row, column] = 1
    return images


def centers(images: Tensor) -> tuple[Tensor, Tensor]:
    """Where the light of each image lies on average, x to the right and y down, in pixels from the center."""
    height, width = images.shape[2:]
    light = images.sum(1)
    y, x = (torch.arange(size, dtype=images.dtype) - (size - 1) / 2 for size in (height, width))
    total = light.sum((1, 2))
    return (light.sum(1) * x).sum(1) / total, (light.sum(2) * y).sum(1) / total


class TestText:
    @pytest.mark.parametrize(
        ("text", "fields"),
        [
            ("shift=2,flip,affine=10", {"shift": 2, "flip": True, "rotation": 10.0}),
            ("affine=10/0.1/0.05", {"rotation": 10.0, "scale": 0.1, "shear": 0.05}),
            ("affine=0/0.1", {"scale": 0.1}),
            ("cutout=8,flip", {"flip": True, "cutout": 8}),
            (" flip , shift=4 ", {"shift": 4, "flip": True}),
            ("none", {}),
            ("shift=0,affine=0", {}),
        ],
    )
    def test_parts_become_fields(self, text, fields):
        assert Augmentation.parse(text) == Augmentation(**fields)

    @given(
        st.builds(
            Augmentation,
            shift=st.integers(0, 50),
            flip=st.booleans(),
            rotation=st.floats(0, 180),
            scale=st.floats(0, 0.9),
            shear=st.floats(0, 1),
            cutout=st.integers(0, 50),
        )
    )
    def test_back_from_text(self, augmentation):
        assert Augmentation.parse(str(augmentation)) == augmentation

    def test_text_is_short(self):
        assert str(Augmentation(shift=4, flip=True)) == "shift=4,flip"
        assert str(Augmentation(rotation=10, shear=0.1)) == "affine=10/0/0.1"
        assert str(Augmentation()) == "none"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "augment can't be ''; give parts such as shift=2, flip, affine=10"),
            ("rotate=10", "augment can't be 'rotate=10'; give parts such as"),
            ("shift", "augment can't be 'shift'"),
            ("flip=1", "augment can't be 'flip=1'"),
            ("flip,", "augment can't be ''"),
            ("none,flip", "augment can't be 'none'"),
            ("shift=1,shift=2", "augment has shift twice"),
            ("affine=1,affine=0/0.1", "augment has affine twice"),
            ("flip,flip", "augment has flip twice"),
            ("shift=1.5", r"whole number of pixels, as in shift=2, not '1\.5'"),
            ("shift=", "whole number of pixels"),
            ("affine=", r"affine is degrees\[/scale\[/shear\]\], as in affine=10 .* not ''"),
            ("affine=ten", "not 'ten'"),
            ("affine=1/0.1/0.1/0.1", "not '1/0.1/0.1/0.1'"),
            ("affine=10/", "not '10/'"),
            ("cutout=0.5", r"augment's cutout is a whole number of pixels, as in cutout=2, not '0\.5'"),
            ("cutout=-1", r"augment\.cutout must be at least 0, not -1"),
            ("shift=-1", r"augment\.shift must be at least 0, not -1"),
            ("affine=nan", r"augment\.rotation must be finite"),
            ("affine=181", r"augment\.rotation must be between 0 and 180"),
            ("affine=0/1", r"augment\.scale must be between 0 and 0\.9"),
            ("affine=0/0/-1", r"augment\.shear must be between 0 and 1"),
        ],
    )
    def test_mistakes_are_named(self, text, message):
        with pytest.raises(RecipeError, match=message):
            Augmentation.parse(text)

    def test_fields_are_checked_too(self):
        with pytest.raises(RecipeError, match=r"augment\.flip must be of type bool, not 1"):
            Augmentation(flip=1)


class TestShift:
    def test_an_impulse_moves_as_far_as_allowed_and_all_ways_alike(self):
        k, n = 2, 25_000
        moved = Augmentation(shift=k).apply(impulses(n, 4, 5), seeded())
        assert torch.equal(moved.sum((1, 2, 3)), torch.ones(n))  # whole, and one pixel each
        assert moved.max() == 1
        counts = moved.sum((0, 1))
        assert counts.sum() == counts[4 - k : 4 + k + 1, 5 - k : 5 + k + 1].sum() == n
        # Twenty-five places, each within five standard errors of n / 25: rows and columns uniform and independent.
        expected = n / 25
        assert ((counts[2:7, 3:8] - expected).abs() < 5 * math.sqrt(expected)).all()

    def test_zeros_come_in_and_nothing_comes_round(self):
        image = 1 + torch.arange(20.0).reshape(1, 1, 4, 5)
        moved = Augmentation(shift=3).apply(image.expand(200, 1, 4, 5), seeded())
        seen = set()
        for one in moved[:, 0]:
            rows, columns = one.nonzero().unbind(1)
            block = one[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            top, left = divmod(int(block[0, 0]) - 1, 5)
            assert torch.equal(block, image[0, 0, top : top + block.shape[0], left : left + block.shape[1]])
            down, right = int(rows.min()) - top, int(columns.min()) - left
            assert block.shape == (4 - abs(down), 5 - abs(right))
            seen.add((down, right))
        assert len(seen) > 40  # of 49

    def test_as_far_as_the_image_is_wide_is_too_far(self):
        with pytest.raises(RecipeError, match=r"augment\.shift=9 would move images of 9 × 11 out of sight"):
            Augmentation(shift=9).apply(impulses(1, 4, 5))
        assert Augmentation(shift=8).apply(impulses(1, 4, 5)).shape == (1, 1, 9, 11)


class TestFlip:
    def test_half_of_the_images_are_mirrored(self):
        n = 10_000
        images = torch.rand(1, 2, 3, 5).expand(n, 2, 3, 5)
        flipped = Augmentation(flip=True).apply(images, seeded())
        mirrored = (flipped == images.flip(3)).flatten(1).all(1)
        kept = (flipped == images).flatten(1).all(1)
        assert (mirrored ^ kept).all()
        assert abs(int(mirrored.sum()) - n / 2) < 5 * math.sqrt(n / 4)


class TestCutout:
    @pytest.mark.parametrize("side", [1, 4, 5])
    def test_a_square_about_any_pixel_is_hidden(self, side):
        n, height, width = 20_000, 9, 11
        hidden = Augmentation(cutout=side).apply(torch.ones(n, 2, height, width), seeded()) == 0
        assert torch.equal(hidden[:, 0], hidden[:, 1])
        for line in (hidden[:, 0].any(2), hidden[:, 0].any(1)):  # rows, then columns
            length = line.shape[1]
            # Whole where its center is far enough from the edges, and cut off there: at least the center is inside.
            first, last = line.float().argmax(1), length - 1 - line.flip(1).float().argmax(1)
            assert torch.equal(line.sum(1), last - first + 1)
            assert ((line.sum(1) == side) | (first == 0) | (last == length - 1)).all()
            # Each place lies in it by chance: as many centers as bring it there, each as likely.
            centers = torch.arange(length)
            expected = (
                torch.stack(
                    [((place >= centers - side // 2) & (place < centers - side // 2 + side)).sum() for place in centers]
                )
                / length
            )
            error = 5 * (expected * (1 - expected) / n).sqrt() + 1e-9
            assert ((line.float().mean(0) - expected).abs() < error).all()

    def test_what_is_not_hidden_stays(self):
        images = torch.rand(50, 3, 9, 11) + 1
        changed = Augmentation(cutout=4).apply(images, seeded())
        assert torch.equal(changed[changed != 0], images[changed != 0])
        assert ((changed == 0).flatten(1).sum(1) <= 3 * 16).all()

    def test_as_large_as_the_image_is_too_large(self):
        with pytest.raises(RecipeError, match=r"augment\.cutout=9 could hide whole images of 9 × 11"):
            Augmentation(cutout=9).apply(impulses(1, 4, 5))

    def test_other_parts_draw_what_they_drew_without_it(self):
        images, without = torch.rand(8, 1, 12, 12) + 1, Augmentation(shift=2, flip=True)
        changed = Augmentation(shift=2, flip=True, cutout=4).apply(images, seeded())
        expected = without.apply(images, seeded())
        assert torch.equal(changed[changed != 0], expected[changed != 0])


class TestAffine:
    @pytest.mark.parametrize("size", [(8, 8), (7, 12), (28, 28), (32, 32)])
    def test_nothing_is_the_identity(self, size):
        images = torch.rand(3, 2, *size)
        assert torch.equal(Augmentation.parse("affine=0").apply(images), images)
        # Also by way of the interpolation.
        torch.testing.assert_close(Augmentation(rotation=1e-9).apply(images), images, rtol=0, atol=1e-5)

    def test_angles_are_uniform(self):
        """An impulse at distance r turns on a circle; its center tells the angle."""
        n, limit = 4000, 20.0
        images = blobs(n, x=8, y=0)
        x, y = centers(Augmentation(rotation=limit).apply(images, seeded()))
        angles = torch.rad2deg(torch.atan2(y, x))
        torch.testing.assert_close(torch.hypot(x, y), torch.full((n,), 8.0), rtol=0, atol=0.05)
        check_uniform(angles, -limit, limit)

    def test_turns_are_turns_in_images_that_are_not_square(self):
        x, y = centers(Augmentation(rotation=90).apply(blobs(500, x=0, y=6, size=(29, 45)), seeded()))
        torch.testing.assert_close(torch.hypot(x, y), torch.full((500,), 6.0), rtol=0, atol=0.05)
        assert x.max() > 5
        assert x.min() < -5

    def test_scales_are_uniform_and_the_center_stays(self):
        x, y = centers(Augmentation(scale=0.2).apply(blobs(4000, x=6, y=-3), seeded()))
        check_uniform(x / 6, 0.8, 1.2)
        torch.testing.assert_close(y, -x / 2, rtol=0, atol=0.05)

    def test_rows_are_sheared_against_each_other(self):
        x, y = centers(Augmentation(shear=0.2).apply(blobs(4000, x=1, y=8), seeded()))
        torch.testing.assert_close(y, torch.full((4000,), 8.0), rtol=0, atol=0.05)
        check_uniform((1 - x) / 8, -0.2, 0.2)

    def test_outside_is_zero(self):
        turned = Augmentation(rotation=45).apply(torch.ones(50, 1, 9, 9), seeded())
        assert turned.min() == 0
        torch.testing.assert_close(turned[:, :, 4, 4], torch.ones(50, 1))
        assert turned[:, :, 0, 0].mean() < 0.9

    def test_it_is_what_torch_makes_of_the_same_matrices(self):
        """Against `affine_grid`, with the matrix of the docstring and the same draws."""
        images = torch.rand(6, 3, 10, 14, dtype=torch.float64)
        draws = torch.rand(3, 6, generator=seeded(3), dtype=torch.float64) * 2 - 1
        angle, scale, shear = draws[0] * math.radians(10), 1 + draws[1] * 0.1, draws[2] * 0.2
        turn = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)], 1).view(6, 2, 2)
        slant = torch.eye(2, dtype=torch.float64).repeat(6, 1, 1)
        slant[:, 0, 1] = shear
        matrix = turn @ slant / scale[:, None, None]
        aspect = torch.tensor([[1, 10 / 14], [14 / 10, 1]], dtype=torch.float64)
        theta = torch.cat([matrix * aspect, torch.zeros(6, 2, 1, dtype=torch.float64)], 2)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        expected = F.grid_sample(images, grid, align_corners=False)
        found = Augmentation(rotation=10, scale=0.1, shear=0.2).apply(images, seeded(3))
        torch.testing.assert_close(found, expected)


def blobs(n: int, x: float, y: float, size: tuple[int, int] = (33, 33)) -> Tensor:
    """Images of one round spot, at (x, y) from the center: smooth, so that interpolation leaves its place alone."""
    rows, columns = (torch.arange(length) - (length - 1) / 2 for length in size)
    spot = torch.exp(-((rows[:, None] - y) ** 2 + (columns - x) ** 2) / (2 * 1.5**2))
    return spot.expand(n, 1, *size)


def check_uniform(values: Tensor, low: float, high: float) -> None:
    """Within five standard errors: Kolmogorov's distance between the values and the uniform distribution."""
    n = len(values)
    assert values.min() > low - 0.02 * (high - low)
    assert values.max() < high + 0.02 * (high - low)
    ranks = (torch.arange(n) + 0.5) / n
    distance = ((values.sort().values - low) / (high - low) - ranks).abs().max()
    assert distance < 2 / math.sqrt(n)


class TestApply:
    def test_the_same_state_gives_the_same_images_and_goes_on_alike(self):
        images = torch.rand(16, 3, 12, 12)
        first, second = seeded(7), seeded(7)
        assert torch.equal(ALL.apply(images, first), ALL.apply(images, second))
        state = first.get_state()
        next_images = ALL.apply(images, first)
        resumed = seeded(99)
        resumed.set_state(state)
        assert torch.equal(ALL.apply(images, resumed), next_images)
        assert not torch.equal(ALL.apply(images, resumed), next_images)

    def test_random_numbers_are_drawn_from_the_generator_alone(self):
        images = torch.rand(4, 1, 12, 12)
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        ALL.apply(images, seeded())
        assert torch.equal(torch.rand(3), expected)
        # Without one, from torch's own.
        torch.manual_seed(0)
        first = ALL.apply(images)
        torch.manual_seed(0)
        assert torch.equal(ALL.apply(images), first)

    def test_given_images_stay_as_they_are(self):
        images = torch.rand(4, 3, 12, 12)
        copy = images.clone()
        ALL.apply(images, seeded())
        assert torch.equal(images, copy)

    def test_channels_of_an_image_move_together_and_images_apart(self):
        images = torch.rand(1, 1, 12, 12).expand(30, 3, 12, 12)
        changed = ALL.apply(images, seeded())
        assert torch.equal(changed[:, 0], changed[:, 1])
        assert torch.equal(changed[:, 0], changed[:, 2])
        assert all(not torch.equal(changed[0], other) for other in changed[1:])

    def test_channels_keep_their_places(self):
        images = torch.ones(20, 3, 12, 12) * torch.tensor([1.0, 10.0, 100.0]).reshape(3, 1, 1)
        changed = ALL.apply(images, seeded())
        torch.testing.assert_close(changed[:, 1], changed[:, 0] * 10)
        torch.testing.assert_close(changed[:, 2], changed[:, 0] * 100)

    def test_none_changes_nothing(self):
        images = torch.rand(2, 1, 5, 5)
        assert torch.equal(Augmentation().apply(images), images)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_floating_types_stay_what_they_are(self, dtype):
        images = torch.rand(8, 1, 12, 12)
        changed = Augmentation(shift=2, rotation=10).apply(images.to(dtype), seeded())
        assert changed.dtype == dtype
        if dtype != torch.float64:  # which draws other numbers
            expected = Augmentation(shift=2, rotation=10).apply(images, seeded())
            torch.testing.assert_close(changed.float(), expected, rtol=0.01, atol=0.01)

    @pytest.mark.parametrize("strides", ["channels last", "expanded", "sliced"])
    def test_images_in_any_order_of_memory(self, strides):
        images = {
            "channels last": torch.rand(4, 3, 12, 12).to(memory_format=torch.channels_last),
            "expanded": torch.rand(1, 3, 12, 12).expand(4, 3, 12, 12),
            "sliced": torch.rand(8, 6, 24, 24)[::2, ::2, ::2, ::2],
        }[strides]
        assert torch.equal(ALL.apply(images, seeded()), ALL.apply(images.clone().contiguous(), seeded()))

    def test_what_is_no_image_is_refused(self):
        with pytest.raises(DataError, match=r"augment=shift=2,flip.* inputs have shape \(5, 784\)"):
            ALL.apply(torch.rand(5, 784))
        with pytest.raises(DataError, match=r"images of floats whose background is 0, not of torch\.uint8"):
            ALL.apply(torch.zeros(5, 3, 32, 32, dtype=torch.uint8))

    @pytest.mark.gpu
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_a_gpu_is_never_waited_for_and_can_record_it(self):
        images, generator = torch.rand(16, 3, 12, 12, device="cuda"), torch.Generator("cuda").manual_seed(5)
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = [ALL.apply(images, generator) for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        generator.manual_seed(5)
        recording = torch.cuda.CUDAGraph()
        recording.register_generator_state(generator)
        with torch.cuda.graph(recording):
            changed = ALL.apply(images, generator)
        for one in expected:
            recording.replay()
            assert torch.equal(changed, one)


class TestTransforms:
    def test_none_an_augmentation_or_a_callable(self):
        images = torch.rand(4, 3, 12, 12)
        assert augmented(images, None, seeded()) is images
        assert torch.equal(augmented(images, ALL, seeded()), ALL.apply(images, seeded()))
        assert torch.equal(augmented(images, lambda batch: batch * 2, seeded()), images * 2)
        pair = (images, torch.arange(4))
        assert augmented(pair, lambda batch: (batch[0] + 1, batch[1]), None)[0] is not images

    def test_a_callable_may_draw_from_the_global_generator(self):
        torch.manual_seed(3)
        expected = torch.ones(4, 2) + torch.rand(4, 2)
        torch.manual_seed(3)
        assert torch.equal(augmented(torch.ones(4, 2), lambda batch: batch + torch.rand(4, 2), None), expected)

    @pytest.mark.parametrize(
        "wrong", [lambda batch: batch[:2], lambda batch: None, lambda batch: (batch,) * 2, lambda batch: batch.sum()]
    )
    def test_a_callable_that_gives_something_else_is_named(self, wrong):
        with pytest.raises(DataError, match=r"the transform .*lambda.* must give as many inputs as it is given"):
            augmented(torch.rand(4, 2), wrong, None)

    def test_a_callable_that_fails_is_named(self):
        with pytest.raises(TrainingError, match=r"the transform .*lambda.* fails on a batch; .* IndexError: "):
            augmented(torch.rand(4, 2), lambda batch: batch[9], None)

    def test_an_augmentation_changes_one_tensor(self):
        with pytest.raises(DataError, match="changes one tensor of images, not tuple of inputs"):
            augmented((torch.rand(4, 3, 12, 12), torch.rand(4, 2)), ALL, None)
