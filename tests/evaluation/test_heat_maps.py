"""Heat maps: one for each name, none of their text outside of the figure."""

import random

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from src.evaluation.figures import heat_map, heat_maps


def _drawn(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


@pytest.mark.parametrize("n_maps", [1, 2, 5, 8])
@pytest.mark.parametrize("n_columns", [1, 4, 9])
def test_one_map_a_name_and_all_text_inside(seed, n_maps, n_columns):
    cells = {f"task_{i}": np.random.default_rng(seed + i).random((3, n_columns)) for i in range(n_maps)}
    title = "".join(random.choices("WMabc-123_", k=random.randint(5, 70))) + ": needles found"
    figure = heat_maps(
        cells, columns=[1000 * (i + 1) for i in range(n_columns)], rows=["0%", "50%", "100%"],
        x="length, tokens (dashed: where training ended)", y="depth", title=title, trained_columns=1,
    )  # fmt: skip
    renderer = _drawn(figure)
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == list(cells)
    assert len(figure.axes) == n_maps + 1  # one colour bar
    for axes, (_, values) in zip(maps, cells.items(), strict=True):
        assert np.array_equal(axes.images[0].get_array(), values)
        assert [text.get_text() for text in axes.texts] == [f"{value:.0%}" for value in values.flat]
        assert [line.get_linestyle() for line in axes.lines] == ["--"] * (n_columns > 1)
    assert "".join(figure._suptitle.get_text().split()) == "".join(title.split())
    for text in (figure._suptitle, figure._supxlabel, *(axes.title for axes in maps)):
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width


def test_a_single_map_leaves_unknown_cells_empty():
    cells = np.array([[0.0, np.nan], [1.0, 0.5]])
    figure = heat_map(cells, columns=[4, 8], rows=[64, 1024], x="pairs", y="tokens", title="recall")
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["0%", "100%", "50%"]
    assert [text.get_color() for text in axes.texts] == ["white", "white", "black"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["64", "1K"]
    assert not axes.lines
