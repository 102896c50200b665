"""Figures of evaluations: heat maps, one for each name, none of their text outside of the figure; and curves."""

import random

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from src.evaluation.figures import curves, heat_map, heat_maps, sample


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
        x="length, tokens", y="depth", title=title, share="needles found", trained_columns=1,
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
    assert ("dashed: the trained length" in figure._supxlabel.get_text()) == (n_columns > 1)
    bar = figure.axes[-1]
    assert bar.get_ylabel() == "needles found"
    assert [label.get_text() for label in bar.get_yticklabels()][:: len(bar.get_yticks()) - 1] == ["0%", "100%"]
    for text in (figure._suptitle, figure._supxlabel, bar.yaxis.label, *(axes.title for axes in maps)):
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y0 >= 0
        assert box.y1 <= figure.bbox.height


def test_a_single_map_leaves_unknown_cells_empty():
    cells = np.array([[0.0, np.nan], [1.0, 0.5]])
    options = {"columns": [4, 8], "rows": [64, 1024], "x": "pairs", "y": "tokens", "title": "a", "share": "accuracy"}
    figure = heat_map(cells, **options)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["0%", "100%", "50%"]
    assert [text.get_color() for text in axes.texts] == ["white", "white", "black"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["64", "1K"]
    assert not axes.lines
    assert figure._supxlabel.get_text() == "pairs\n(empty: not measured)"
    assert heat_map(np.ones((2, 2)), **options)._supxlabel.get_text() == "pairs"


@pytest.mark.parametrize(("trained", "drawn"), [(None, False), (0, False), (1, True), (2, False)])
def test_a_line_below_the_trained_rows_and_its_note(trained, drawn):
    options = {"columns": [4], "rows": [64, 128], "x": "pairs", "y": "tokens", "title": "a", "share": "accuracy"}
    figure = heat_map(np.ones((2, 1)), **options, trained_rows=trained)
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[0.5, 0.5]] * drawn
    assert ("dashed: the trained length" in figure._supxlabel.get_text()) == drawn


def test_what_the_cells_were_measured_on():
    assert sample("val", [1000, 1000]) == "val, 1,000 examples a cell"
    assert sample("test", [12, 8]) == "test, 8 to 12 examples a cell"
    assert sample("val", [1]) == "val, 1 example a cell"


def test_the_legend_of_a_curve_says_what_its_band_is():
    def legend(**more):
        [axes] = curves({"a": ([8, 16], [2.0, 1.0])}, x="x", y="y", title="t", **more).axes
        return [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []

    assert legend(errors={"a": [0.1, 0.2]}) == ["a", "± 1 standard error"]
    assert legend(errors={"a": [np.nan, np.nan]}) == []  # of one window
    assert legend() == []
