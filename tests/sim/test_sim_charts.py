"""Charts of the simulator's pages, as SVG text."""

import re

from mooncake.app.sim.output.charts import HEIGHT, LEFT, RIGHT, WIDTH, Series, lines


def last_x(chart: str) -> float:
    [points] = re.findall(r'polyline points="([^"]*)"', chart)
    return float(points.split()[-1].partition(",")[0])


def texts(chart: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", chart)


def test_a_legend_is_below_the_chart_and_within_it_however_long() -> None:
    names = [f"policy number {at}" for at in range(14)]
    chart = lines("reused", "load", "share", [Series(name, [0, 1], [0.9, 1.0]) for name in names])
    entries = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="legend">([^<]*)</text>', chart)
    assert [name for _, _, name in entries] == names
    [height] = re.findall(rf'viewBox="0 0 {WIDTH} (\d+)"', chart)
    assert all(HEIGHT < float(y) < int(height) for _, y, _ in entries)
    assert all(LEFT < float(x) < WIDTH - 6 * len(name) for x, _, name in entries)
    assert f'viewBox="0 0 {WIDTH} {HEIGHT}"' in lines("one", "s", "share", [Series("", [0, 1], [0, 1])])


def test_charts_over_time_end_where_they_are_told() -> None:
    half = lines("sent", "minutes", "requests", [Series("", [0, 5], [1, 2])], end=10.0)
    assert last_x(half) == (LEFT + WIDTH - RIGHT) / 2
    assert "10" in texts(half)
    assert last_x(lines("sent", "minutes", "requests", [Series("", [0, 5], [1, 2])])) == WIDTH - RIGHT


def test_a_logarithmic_axis_has_marks_within_a_decade_too() -> None:
    assert {"0.2", "0.5"} <= set(texts(lines("TTFT", "s", "share", [Series("", [0.2, 0.9], [0, 1])], log_x=True)))
    within_a_tenth = texts(lines("TTFT", "s", "share", [Series("", [0.31, 0.33], [0, 1])], log_x=True))
    assert len([text for text in within_a_tenth if text.startswith("0.3")]) >= 2
    assert {"1", "10", "100"} <= set(texts(lines("TTFT", "s", "share", [Series("", [0.5, 200], [0, 1])], log_x=True)))
