"""What the README claims is what the committed results say."""

from benchmarks.tools import readme


def test_the_tables_of_the_readme_are_those_of_the_results():
    text = readme.README.read_text()
    assert readme.BEGIN in text and readme.END in text
    assert text == readme.render(text)


def test_a_changed_figure_is_noticed():
    text = readme.README.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `ppo_continuous_action`, HalfCheetah"))
    assert readme.render(text.replace(row, row.replace("1", "2"))) == text
