"""The demo's detector: geometry of the cascade, checked by hand-made answers of the networks."""

import numpy as np
import pytest

from examples.demo import detector


def boxes(*rows):
    return np.array(rows, np.float32).reshape(-1, 4)


def scores(*values):
    return np.array(values, np.float32)


def pairs(*values):
    """Scores as the networks give them: (no face, face)."""
    return np.array([(1 - value, value) for value in values], np.float32).reshape(-1, 2)


@pytest.mark.parametrize(("pixels", "expected"), [(0, 0), (11, 1), (12, 1), (13, 2), (14, 2), (15, 3), (328, 159)])
def test_cells_follow_from_three_convolutions_and_a_pool_that_rounds_up(pixels, expected):
    after_pool = -(-(pixels - 2) // 2)
    assert detector.cells(pixels) == max(0, after_pool - 4) == expected


@pytest.mark.parametrize(
    ("width", "height", "min_face"), [(256, 144, 16), (176, 144, 20), (640, 272, 12), (40, 300, 20)]
)
def test_pyramid_levels_lie_on_the_canvas_and_do_not_touch(width, height, min_face):
    layout = detector.pyramid(width, height, min_face)
    owner = np.zeros((layout.width, layout.height), int)
    for level in layout.levels:
        assert level.x % detector.STRIDE == level.y % detector.STRIDE == 0
        place = owner[level.x : level.x + level.width, level.y : level.y + level.height]
        assert place.shape == (level.width, level.height)
        place += 1
    assert owner.max() == 1


def test_pyramid_ends_at_one_cell():
    layout = detector.pyramid(256, 144, min_face=16, factor=0.5)
    assert [level.scale for level in layout.levels] == [0.75, 0.375, 0.1875, 0.09375]
    assert (layout.levels[0].width, layout.levels[0].height) == (192, 108)
    assert min(layout.levels[-1].width, layout.levels[-1].height) >= detector.CELL
    assert layout.grid == (detector.cells(layout.width), detector.cells(layout.height))


def test_pyramid_refuses_a_frame_smaller_than_a_face():
    with pytest.raises(ValueError, match="20x100 cannot hold a face of 24"):
        detector.pyramid(20, 100, min_face=24)


def test_normalize_transposes_and_scales():
    image = np.zeros((2, 3, 3), np.uint8)
    image[1, 2] = (0, 127, 255)
    out = np.full((3, 2, 3), np.nan, np.float32)
    detector.normalize(image, out)
    assert out[2, 1].tolist() == pytest.approx([-127.5 / 128, -0.5 / 128, 127.5 / 128])
    assert out[0, 0].tolist() == pytest.approx([-127.5 / 128] * 3)


def test_nms_keeps_the_best_of_overlapping_boxes():
    given = boxes((0, 0, 10, 10), (1, 1, 11, 11), (20, 20, 30, 30), (0, 0, 10, 9))
    assert detector.nms(given, scores(0.8, 0.9, 0.5, 0.7), 0.5).tolist() == [1, 2]


def test_nms_counts_touching_boxes_as_apart_and_takes_none():
    assert detector.nms(boxes((0, 0, 10, 10), (10, 0, 20, 10)), scores(0.5, 0.6), 0.0).tolist() == [1, 0]
    assert detector.nms(boxes(), scores(), 0.5).tolist() == []


def test_nms_of_the_smaller_area_drops_a_box_inside_another():
    given, score = boxes((0, 0, 100, 100), (40, 40, 50, 50)), scores(0.9, 0.8)
    assert detector.nms(given, score, 0.7).tolist() == [0, 1]
    assert detector.nms(given, score, 0.7, of_smaller=True).tolist() == [0]


def test_refine_moves_by_fractions_of_the_box():
    moved = detector.refine(boxes((10, 20, 30, 60)), boxes((0.5, 0.25, -0.5, 0)))
    assert moved.tolist() == [[20, 30, 20, 60]]


def test_square_keeps_the_centre():
    assert detector.square(boxes((10, 10, 20, 40))).tolist() == [[0, 10, 30, 40]]


def answer(layout):
    return np.zeros((*layout.grid, 2), np.float32), np.zeros((*layout.grid, 4), np.float32)


@pytest.mark.parametrize("number", range(7))
def test_candidates_of_every_level_come_back_to_the_frame(number):
    layout = detector.pyramid(256, 144)
    level = layout.levels[number]
    score, offset = answer(layout)
    score[level.x // 2, level.y // 2, 1] = 0.95
    box, found = detector.candidates(score, offset, layout)
    assert box.tolist() == [pytest.approx([0, 0, 12 / level.scale, 12 / level.scale], rel=1e-6)]
    assert found.tolist() == pytest.approx([0.95])


def test_candidates_ignore_cells_that_see_two_levels():
    layout = detector.pyramid(256, 144)
    first = layout.levels[0]
    score, offset = answer(layout)
    score[detector.cells(first.width), 0, 1] = 0.99  # the first cell that reaches beyond the level
    box, found = detector.candidates(score, offset, layout)
    assert box.shape == (0, 4)
    assert found.shape == (0,)


def test_candidates_apply_offsets_and_suppress_across_levels():
    layout = detector.pyramid(256, 144, factor=0.95)
    score, offset = answer(layout)
    for level, value in zip(layout.levels[:2], (0.8, 0.9), strict=True):
        score[level.x // 2, level.y // 2, 1] = value
        offset[level.x // 2, level.y // 2] = (0.5, 0.5, 0, 0)
    side = 12 / layout.levels[1].scale
    box, found = detector.candidates(score, offset, layout)
    assert box.tolist() == [pytest.approx([side / 2, side / 2, side, side], rel=1e-6)]
    assert found.tolist() == pytest.approx([0.9])


def test_narrowed_drops_the_weak_and_squares_the_rest():
    given = boxes((0, 0, 10, 10), (50, 50, 60, 70), (100, 100, 110, 110))
    kept = detector.narrowed(given, np.zeros((3, 4), np.float32), pairs(0.75, 0.9, 0.1))
    assert kept.tolist() == [[45, 50, 65, 70], [0, 0, 10, 10]]


def test_faces_give_points_in_the_square_that_onet_saw():
    given = boxes((100, 50, 148, 98), (0, 0, 48, 48))
    points = np.zeros((2, 10), np.float32)
    points[0] = [0, 0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0]
    offsets = boxes((0.25, 0, 0, 0), (0, 0, 0, 0))
    faces = detector.faces(given, offsets, points, pairs(0.9, 0.2))
    assert faces.boxes.tolist() == [[112, 50, 148, 98]]
    assert faces.scores.tolist() == pytest.approx([0.9])
    assert faces.points.tolist() == [[[100, 98], [112, 86], [124, 74], [136, 62], [148, 50]]]


def test_no_faces_have_the_shapes_of_faces():
    none = detector.Faces.none()
    some = detector.faces(boxes((0, 0, 9, 9)), boxes((0, 0, 0, 0)), np.zeros((1, 10), np.float32), pairs(0.1))
    assert none.boxes.shape == some.boxes.shape
    assert none.scores.shape == some.scores.shape
    assert none.points.shape == some.points.shape


def test_crop_of_whole_pixels_is_the_pixels_transposed():
    frame = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)
    out = np.empty((1, 24, 24, 3), np.float32)
    detector.crops(frame, boxes((7, 3, 31, 27)), out)
    expected = (frame[3:27, 7:31].transpose(1, 0, 2).astype(np.float32) - 127.5) / 128
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


def test_crop_resamples_a_gradient_exactly_and_repeats_the_border():
    frame = np.repeat(np.arange(0, 200, 2, dtype=np.uint8)[None, :, None], 50, axis=0).repeat(3, axis=2)
    out = np.empty((2, 4, 4, 3), np.float32)
    detector.crops(frame, boxes((10, 10, 18, 18), (-40, 0, -20, 20)), out)
    pixels = out * 128 + 127.5
    np.testing.assert_allclose(pixels[0, :, 0, 0], [21, 25, 29, 33], atol=1e-3)  # centres at x = 10.5, 12.5, …
    np.testing.assert_allclose(pixels[1], 0, atol=1e-3)
