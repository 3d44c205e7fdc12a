"""Tables of text: columns as wide as their cells."""

from hybridrl.driver.text_table import text_table


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_their_text():
    # Widths 5 (the title) and 4 (the second cell); the last cell of the first row ends the line.
    assert text_table(("stage", "s"), [("a", "1"), ("bc", "23.4")]) == [
        "stage  s",
        "-----  ----",
        "a      1",
        "bc     23.4",
    ]


def test_columns_after_the_first_ones_may_be_aligned_on_the_right():
    assert text_table(("stage", "s"), [("a", "1"), ("bc", "23.4")], is_ruled=False, num_left=1) == [
        "stage     s",
        "a         1",
        "bc     23.4",
    ]
