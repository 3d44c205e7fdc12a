"""The graph of a step: edges of data, state and order, and the renderings."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.framework import StageSpec
from hybridrl.framework.graph.stage_graph import (
    Edge,
    RolePlacement,
    picture_lines,
    stage_graph,
    to_picture,
    to_text,
)

PLACEMENTS = {
    "policy": RolePlacement("all", 2, "policy+critic"),
    "critic": RolePlacement("all", 2, "policy+critic"),
    "scorer": RolePlacement("few", 1, "scorer"),
}
STEP = (
    StageSpec("draw", None, (), ("ids", "seeds")),
    StageSpec("write", "policy", ("ids", "seeds"), ("ids", "answers"), pure=True),
    StageSpec("score", "scorer", ("answers",), ("scores",), pure=True),
    StageSpec("guess", "critic", ("ids", "answers"), ("guesses",), pure=True),
    StageSpec("learn", "critic", ("scores", "guesses")),
    StageSpec("improve", "policy", ("ids", "answers", "scores")),
    StageSpec("report", None),
)


def edges(graph, *, kind):
    chosen = {
        "columns": lambda e: e.columns,
        "state": lambda e: e.state,
        "order": lambda e: not e.columns and not e.state,
    }[kind]
    return {(e.source, e.target + "'" * e.next_step) for e in graph.edges if chosen(e)}  # ' is the next step's


def test_a_column_comes_from_the_stage_that_wrote_it_last():
    graph = stage_graph(STEP, PLACEMENTS)
    assert Edge("draw", "write", ("ids", "seeds")) in graph.edges
    assert Edge("write", "improve", ("ids", "answers")) in graph.edges  # write's ids, not draw's
    assert edges(graph, kind="columns") == {
        ("draw", "write"),
        ("write", "score"),
        ("write", "guess"),
        ("score", "learn"),
        ("guess", "learn"),
        ("write", "improve"),
        ("score", "improve"),
    }


def test_state_comes_from_its_last_change_if_necessary_of_the_previous_step():
    graph = stage_graph(STEP, PLACEMENTS)
    assert edges(graph, kind="state") == {("improve", "write'"), ("learn", "guess'")}
    assert edges(stage_graph((*STEP, StageSpec("check", "policy", pure=True)), PLACEMENTS), kind="state") == {
        ("improve", "write'"),
        ("improve", "check"),
        ("learn", "guess'"),
    }


def test_state_that_no_stage_changes_has_no_edges():
    assert not [
        edge
        for edge in stage_graph(STEP, PLACEMENTS).edges
        if "score" in (edge.source, edge.target) and not edge.columns
    ]


def test_stages_that_run_once_keep_their_order_where_nothing_else_imposes_it():
    # draw -> learn and draw -> improve follow from columns.
    assert edges(stage_graph(STEP, PLACEMENTS), kind="order") == {
        ("learn", "improve"),
        ("improve", "report"),
        ("report", "draw'"),
    }


def test_state_is_not_changed_while_a_pure_stage_uses_it():
    checked = stage_graph((*STEP, StageSpec("check", "policy", pure=True)), PLACEMENTS)
    assert ("check", "improve'") in edges(checked, kind="order")
    early = (STEP[0], StageSpec("check", "critic", ("ids",), pure=True), *STEP[1:])
    assert ("check", "learn") in edges(stage_graph(early, PLACEMENTS), kind="order")


def test_the_depth_of_a_stage_is_its_longest_chain_of_dependencies():
    # draw 0 -> write 1 -> score, guess 2 -> learn 3 -> improve 4 (run once each, in order) -> report 5
    assert list(stage_graph(STEP, PLACEMENTS).depth.values()) == [0, 1, 2, 2, 3, 4, 5]


def test_a_column_without_a_writer_is_listed():
    graph = stage_graph([StageSpec("score", "scorer", ("answers",), ("scores",), pure=True)], PLACEMENTS)
    assert graph.unwritten == (("score", "answers"),) and graph.edges == ()
    assert "score reads answers, which no stage before it writes" in to_text(graph)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([StageSpec("a"), StageSpec("a")], "2 stages are called 'a'"),
        (
            [StageSpec("a", "judge")],
            "stage 'a' runs in role 'judge', which has no placement; roles that have: policy, critic, scorer",
        ),
    ],
)
def test_two_stages_of_one_name_and_a_role_without_a_placement_are_refused(stages, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        stage_graph(stages, PLACEMENTS)


def some_steps():
    columns = st.lists(st.sampled_from("abcd"), max_size=3, unique=True).map(tuple)
    spec = st.tuples(st.sampled_from([None, *PLACEMENTS]), columns, columns, st.booleans())
    return st.lists(spec, min_size=1, max_size=7).map(
        lambda rows: [StageSpec(f"s{i}", *row) for i, row in enumerate(rows)]
    )


@given(some_steps())
def test_within_a_step_edges_point_forward_and_between_steps_none_is_needed_twice(stages):
    graph = stage_graph(stages, PLACEMENTS)
    position = {spec.name: i for i, spec in enumerate(stages)}
    for edge in graph.edges:
        if not edge.next_step:
            assert position[edge.source] < position[edge.target]
            assert graph.depth[edge.source] < graph.depth[edge.target]
    assert len({(e.source, e.target, e.next_step) for e in graph.edges}) == len(graph.edges)


@given(some_steps())
def test_every_column_that_is_read_was_written_or_is_listed_as_unwritten(stages):
    graph = stage_graph(stages, PLACEMENTS)
    for spec in stages:
        arrived = [column for edge in graph.edges_into(spec.name) for column in edge.columns]
        missing = [column for stage, column in graph.unwritten if stage == spec.name]
        assert sorted(arrived + missing) == sorted(spec.reads)


@given(some_steps())
def test_all_stages_that_run_once_are_forced_into_their_order(stages):
    graph = stage_graph(stages, PLACEMENTS)
    once = [spec.name for spec in stages if not spec.pure]
    before: dict[str, set[str]] = {spec.name: set() for spec in stages}
    for spec in stages:  # in order, so that what a source waits for is known when its target asks
        for edge in graph.edges_into(spec.name):
            if not edge.next_step:
                before[spec.name] |= {edge.source} | before[edge.source]
    assert all(earlier in before[later] for i, later in enumerate(once) for earlier in once[:i])


# -- renderings


def test_the_table_lists_columns_by_source_stage_and_placements():
    text = to_text(stage_graph(STEP, PLACEMENTS))
    assert re.search(r"^improve +policy +all x2 +once +write: ids, answers$", text, re.MULTILINE)
    assert re.search(r"^ +score: scores$", text, re.MULTILINE)
    assert re.search(
        r"^write +policy +all x2 +pure +draw: ids, seeds +ids, answers\n"
        r" +\(state changed by the last step's improve\)$",
        text,
        re.MULTILINE,
    )
    assert re.search(r"^draw +driver +- +once", text, re.MULTILINE)
    assert "all: 2 of policy+critic (roles joined by + share a process)\nfew: 1 of scorer" in text


def test_the_table_fits_its_columns():
    lines = to_text(stage_graph(STEP, PLACEMENTS)).splitlines()
    at = lines[0].index("reads")
    assert all(line[at - 2 : at].strip() == "" for line in lines[2 : lines.index("")])  # no cell runs into the next


def test_the_picture_has_a_line_for_every_column_with_an_arrow_for_every_reader():
    lines = {line.label: line for line in picture_lines(stage_graph(STEP, PLACEMENTS)) if line.kind == "data"}
    assert lines["scores"].source == "score" and lines["scores"].targets == ("learn", "improve")
    assert lines["ids, seeds"].targets == ("write",)  # the same readers: one line
    assert lines["guesses"].targets == ("learn",)


def test_unread_columns_are_in_the_picture_without_an_arrow():
    lines = picture_lines(stage_graph([StageSpec("draw", None, (), ("ids",))], {}))
    assert [(line.label, line.targets) for line in lines] == [("ids", ())]


def test_the_picture_holds_the_names_of_stages_roles_pools_and_columns_as_text():
    picture = ElementTree.fromstring(to_picture(stage_graph(STEP, PLACEMENTS), title="a job"))
    texts = {"".join(element.itertext()) for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    names = {"policy", "critic", "all x2", "few x1", "ids, seeds", "scores", "a job"}
    assert {spec.name for spec in STEP} | names <= texts
    assert "state of policy (next step)" in texts
