"""SVG pictures: names stay in their boxes, lines end under their targets."""

import re
import xml.etree.ElementTree as ElementTree

from hybridrl.framework.graph.drawing import GAP, Box, Line, slot_width, to_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_no_name_leaves_its_box():
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    box = Box(
        "a_stage_with_quite_a_long_name", ("a_role_with_quite_a_long_name", "a_pool_that_is_called_so x128"), "red"
    )
    for text, size, weight in ((box.name, 13, "bold"), (box.lines[0], 11, "normal"), (box.lines[1], 11, "normal")):
        width = TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight)).get_extents().width
        assert width < slot_width([box]) - GAP


def test_a_line_starts_below_its_source_and_has_an_arrow_below_each_target():
    boxes = [Box(name, (), "#fff") for name in "abc"]
    picture = ElementTree.fromstring(to_svg(boxes, [Line("a", ("b", "c"), "x")], title="", notes=()))
    middles = [float(text.get("x")) for text in picture.iter(f"{SVG}text") if text.text in ("a", "b", "c")]
    [dot] = picture.iter(f"{SVG}circle")
    arrows = [path.get("d") for path in picture.iter(f"{SVG}path") if path.get("fill") != "none"]
    assert float(dot.get("cx")) == middles[0]
    assert [float(re.match(r"M([0-9.]+) ", arrow)[1]) for arrow in arrows] == middles[1:]


def test_text_is_escaped():
    picture = to_svg([Box("<a> & b", (), "#fff")], [], title='"t"', notes=("<note>",))
    assert {"<a> & b", '"t"', "<note>"} <= {text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")}


def test_a_picture_is_as_wide_as_its_boxes_and_as_high_as_its_lines_need():
    def size(num_boxes, num_lines):
        boxes = [Box(str(i), (), "#fff") for i in range(num_boxes)]
        root = ElementTree.fromstring(to_svg(boxes, [Line("0", (), "x")] * num_lines, title="", notes=()))
        return float(root.get("width")), float(root.get("height"))

    assert size(6, 1)[0] - size(2, 1)[0] == 4 * slot_width([])
    assert size(1, 5)[1] > size(1, 2)[1]
