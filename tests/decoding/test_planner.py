"""Planning by cost, in simulated time: real trees, planner and calibration; the machine and the head are made
up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.decoding.costs import Costs
from stages.decoding.drafters.calibration import Calibration
from stages.decoding.planner import CostPlanner, Cycle, FixedPlanner, Planner
from stages.decoding.tree import DraftTree, TreeConfig
from stages.errors import EagleError
from tests.decoding.drafting_world import CPU_DRAFT, CPU_VERIFY, GPU_DRAFT, GPU_VERIFY, Profile, World

MACHINES = {"cpu": (CPU_VERIFY, CPU_DRAFT), "gpu": (GPU_VERIFY, GPU_DRAFT)}
HEADS = {
    "good": Profile([0.8, 0.75, 0.7]),
    "small": Profile([0.59, 0.51, 0.46]),
    "bad": Profile([0.2, 0.15]),
    "hopeless": Profile([0.05]),
    "too sure of itself": Profile([0.5, 0.42, 0.35], stretch=1.5, shift=1.0),
    "never sure": Profile([0.6, 0.6], spread=0.0),
}
FIXED = (
    "none",
    "chain:depth=1",
    "chain:depth=2",
    "chain:depth=5",
    "dynamic:depth=3,width=2,nodes=5,min_prob=0,expand_prob=0",
    "dynamic:depth=6,width=4,nodes=15",
)


def speed(
    planner: Planner,
    profile: Callable[[int], Profile],
    machine: str,
    *,
    batch: int = 1,
    sequences: int = 8,
    tokens: int = 120,
) -> float:
    calibration = Calibration() if isinstance(planner, CostPlanner) else None
    costs = Costs(*MACHINES[machine])
    world = World(profile, costs, batch=batch, tokens=tokens, calibration=calibration)
    return world.run(planner, sequences)


def planner(machine: str) -> CostPlanner:
    return CostPlanner(Costs(*MACHINES[machine]))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("head", HEADS)
def test_the_plan_is_about_as_fast_as_the_best_fixed_tree_and_no_slower_than_plain_decoding(
    machine: str, head: str, batch: int
) -> None:
    def profile(sequence: int) -> Profile:
        return HEADS[head]

    sequences = 10
    speeds = [
        speed(FixedPlanner(TreeConfig.parse(tree)), profile, machine, batch=batch, sequences=sequences)
        for tree in FIXED
    ]
    planned = speed(planner(machine), profile, machine, batch=batch, sequences=sequences)
    assert planned >= 0.98 * speeds[0]  # the trials of a hopeless head cost something
    assert planned >= 0.95 * max(speeds)


def test_each_sequence_drafts_as_it_pays_for_it() -> None:
    """Hopeless and good sequences in turn: the good ones are not given up with the others."""

    def profile(sequence: int) -> Profile:
        return HEADS["good"] if sequence % 2 else HEADS["hopeless"]

    plain = speed(FixedPlanner(TreeConfig.parse("none")), profile, "cpu", sequences=20)
    chain = speed(FixedPlanner(TreeConfig.parse("chain:depth=2")), profile, "cpu", sequences=20)
    planned = speed(planner("cpu"), profile, "cpu", sequences=20)
    assert planned > 1.15 * plain
    assert planned > chain


def test_drafting_is_given_up_tried_again_and_taken_up() -> None:
    """A head that suits only the last three quarters of a text."""
    made = planner("cpu")

    class Turning(Profile):
        def chances(self, depth: int, source: random.Random) -> list[float]:
            return HEADS["hopeless" if world.put_out < 1000 else "good"].chances(depth, source)

    world = World(lambda s: Turning([0.5]), Costs(*MACHINES["cpu"]), tokens=4000, calibration=Calibration())
    world.run(made, 1)
    decisions = made.decisions
    assert decisions.given_up >= 2
    assert decisions.trials == decisions.given_up
    assert 0.4 < decisions.drafting / decisions.cycles < 0.8
    assert made._alone[0].drafting
    assert made._alone[0].gain > 0.3


def test_costs_are_corrected_by_what_cycles_take() -> None:
    """The table says that eight rows cost as one; on the machine, which is slower too, they cost twice as
    much."""
    costs = Costs({1: 0.012, 8: 0.012}, {1: 0.0001, 4: 0.0001})
    for _ in range(200):
        costs.observe(1, 0.015, [1], 0.001)
        costs.observe(8, 0.030, [4, 1], 0.003)
    assert costs.verify_s(1) == pytest.approx(0.015, rel=0.1)
    assert costs.verify_s(8) == pytest.approx(0.030, rel=0.1)
    assert costs.draft_s(1) == pytest.approx(0.001, rel=0.2)
    assert costs.draft_s(4) == pytest.approx(0.002, rel=0.2)


@pytest.mark.parametrize("batch", [1, 4])
def test_costs_measured_badly_make_a_plan_little_worse(batch: int) -> None:
    """Times up to a quarter too long here and there, as on a machine that does other things too."""

    def run(planner: Planner) -> float:
        costs = Costs(*MACHINES["cpu"])
        world = World(lambda s: HEADS["small"], costs, batch=batch, calibration=Calibration(), prompt=60)
        return world.run(planner, 16 * batch)

    right = run(planner("cpu"))
    for seed in range(4):
        source = random.Random(seed)
        bad = (
            {rows: seconds * source.choice((1, 1, 1.1, 1.25)) for rows, seconds in table.items()}
            for table in MACHINES["cpu"]
        )
        assert run(CostPlanner(Costs(*bad))) > 0.9 * right


def test_costs_measured_on_a_busy_machine_do_not_rule_drafting_out_for_good() -> None:
    """By the table nothing that is drafted could ever pay."""
    made = CostPlanner(Costs({1: 0.012, 2: 0.030, 4: 0.060, 8: 0.120}, {1: 0.010}))
    costs = Costs(*MACHINES["cpu"])
    world = World(lambda s: HEADS["good"], costs, tokens=6000, calibration=Calibration(), prompt=60)
    plain = 1 / costs.verify_s(1)
    assert world.run(made, 1) > 1.2 * plain


@pytest.mark.parametrize("batch", [1, 4])
def test_a_machine_that_is_faster_and_slower_in_turns_does_not_confuse_the_plan(batch: int) -> None:
    def run(planner: Planner, mood: Callable[[float], float]) -> float:
        calibration = Calibration() if isinstance(planner, CostPlanner) else None
        world = World(
            lambda s: HEADS["good"],
            Costs(*MACHINES["cpu"]),
            batch=batch,
            prompt=60,
            calibration=calibration,
            mood=mood,
        )
        return world.run(planner, 20 * batch)

    def even(seconds: float) -> float:
        return 1.3

    def uneven(seconds: float) -> float:
        return 1.0 if int(seconds) % 2 else 1.6

    plain = FixedPlanner(TreeConfig.parse("none"))
    gain, gain_uneven = (run(planner("cpu"), mood) / run(plain, mood) for mood in (even, uneven))
    assert gain > 1.1
    assert gain_uneven > 0.9 * gain


def test_reading_a_prompt_is_not_held_against_drafting() -> None:
    """Long prompts, which the drafter reads before its first tree."""
    world = World(
        lambda s: HEADS["good"],
        Costs(*MACHINES["cpu"]),
        batch=4,
        tokens=300,
        prompt=500,
        calibration=Calibration(),
    )
    made = planner("cpu")
    world.run(made, 4)
    assert made.decisions.given_up <= 1  # at the end, where few are left of the batch
    assert made.decisions.drafting > 0.9 * made.decisions.cycles


def test_a_larger_batch_begins_with_what_a_smaller_one_has_found() -> None:
    made = planner("cpu")
    hopeless = DraftTree((1, 2), (-1, 0), (0, 1))
    while made.plan([0, 1], [9, 9])[0].kind == "cost":
        made.observe(Cycle([0, 1], [hopeless] * 2, [0, 0], 0.002, 0.0155))
    assert [plan.kind for plan in made.plan([0, 1, 2], [9, 9, 9])] == ["none"] * 3
    assert made.plan([0], [9])[0].kind == "cost"


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10.0), min_size=1))
def test_more_rows_never_cost_less_whatever_was_measured(table: dict[int, float]) -> None:
    costs = Costs(table, {1: 0.0})
    found = [costs.verify_s(rows) for rows in range(1, 100)]
    assert found == sorted(found) or found == pytest.approx(sorted(found), rel=1e-12)
    assert (
        min(table.values()) * (1 - 1e-12) <= costs.verify_s(max(table)) <= max(table.values()) * (1 + 1e-12)
    )


def test_costs_between_measured_sizes_lie_on_a_line_or_on_the_next_step() -> None:
    table = {1: 1.0, 3: 2.0, 5: 6.0}
    on_line, on_steps = Costs(table, {1: 0.0}), Costs(table, {1: 0.0}, padded=True)
    assert [on_line.verify_s(rows) for rows in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert [on_steps.verify_s(rows) for rows in (1, 2, 3, 4, 5, 7)] == [1.0, 2.0, 2.0, 6.0, 6.0, 10.0]
    assert on_line.draft_s(9) == 0.0


@pytest.mark.parametrize("table", [{}, {0: 1.0}, {1: -1.0}])
def test_a_table_without_times_is_refused(table: dict[int, float]) -> None:
    with pytest.raises(EagleError, match="table of draft costs"):
        Costs({1: 1.0}, table)


def test_a_stutter_of_the_machine_moves_little() -> None:
    costs = Costs(CPU_VERIFY, CPU_DRAFT)
    before = costs.verify_s(1)
    costs.observe(1, 5.0, [1], 5.0)
    assert costs.verify_s(1) < 1.1 * before
    assert costs.draft_s(1) < 1.1 * CPU_DRAFT[1]


def test_a_plan_fits_what_is_left_of_the_output_and_drafting_is_given_up_alone() -> None:
    made = CostPlanner(Costs(GPU_VERIFY, GPU_DRAFT), TreeConfig.parse("cost:depth=5,nodes=7"))
    first, last, done = made.plan([0, 1, 2], [9, 2, 0])
    assert (first.depth, first.nodes, last.depth) == (5, 7, 2)
    assert first.prices is last.prices
    assert first.prices is not None
    assert len(first.prices.nodes) == 2 * 7 + 1
    assert done.kind == "none"
    hopeless = DraftTree((1, 2), (-1, 0), (0, 1))
    alone = CostPlanner(Costs(CPU_VERIFY, CPU_DRAFT))
    while not alone.decisions.given_up:
        if alone.plan([3], [9])[0].kind == "cost":
            alone.observe(Cycle([3], [hopeless], [0], 0.0015, 0.0125, [1]))
        else:
            alone.observe(Cycle([3], [DraftTree.root_only(1)], [0], 0.0, 0.012))
    assert alone.plan([3], [9])[0].kind == "none"
    assert alone.decisions.drafting < 20
    assert alone.decisions.acceptance() == [0.0]


def test_nothing_is_drafted_where_not_even_a_sure_draft_would_pay() -> None:
    """Verification by compute: twice the rows, twice the time."""
    made = CostPlanner(Costs({1: 0.01, 64: 0.64}, {1: 0.0}))
    assert [plan.kind for plan in made.plan([0, 1], [9, 9])] == ["none", "none"]
    assert made.decisions.drafting == 0


def test_drafting_goes_on_beside_a_sequence_that_never_drafts() -> None:
    found = []
    for planned in (planner("cpu"), FixedPlanner(TreeConfig.parse("none"))):
        calibration = Calibration() if isinstance(planned, CostPlanner) else None
        world = World(
            lambda s: HEADS["good"], Costs(*MACHINES["cpu"]), tokens=2000, calibration=calibration, beside=1
        )
        found.append(world.run(planned, 1))
    assert found[0] > 1.5 * found[1]


def test_what_other_sequences_take_of_a_forward_is_priced() -> None:
    """Beside many that never draft, a draft costs what it does in so large a batch."""
    alone, crowded = planner("cpu"), planner("cpu")
    prices = [made.plan([0], [9], beside)[0].prices for made, beside in ((alone, 0), (crowded, 15))]
    assert prices[0] is not None
    assert prices[1] is not None
    assert prices[1].nodes[3] > 2 * prices[0].nodes[3]


@pytest.mark.parametrize("factor", [1.5, 4.0, 6.0])
def test_a_machine_that_becomes_slower_for_good_still_drafts(factor: float) -> None:
    found = []
    for planned in (planner("cpu"), FixedPlanner(TreeConfig.parse("none"))):
        world = World(
            lambda s: HEADS["good"],
            Costs(*MACHINES["cpu"]),
            batch=4,
            tokens=6000,
            calibration=Calibration() if isinstance(planned, CostPlanner) else None,
            mood=lambda seconds: 1.0 if seconds < 8 else factor,
        )
        found.append(world.run(planned, 4))
    assert found[0] > 1.2 * found[1]


@pytest.mark.parametrize("tokens", [12, 16, 40])
def test_drafting_is_tried_again_where_answers_are_short(tokens: int) -> None:
    """Shorter than a wait, so that no sequence alone would ever come to the end of one."""
    made, costs = planner("cpu"), Costs(*MACHINES["cpu"])
    World(lambda s: HEADS["hopeless"], costs, tokens=tokens, calibration=Calibration()).run(made, 40)
    before = made.decisions.drafting
    made.start(0)
    good = World(lambda s: HEADS["good"], costs, tokens=tokens, calibration=Calibration())
    good.run(made, 500)
    assert made.decisions.drafting - before > 1000


@pytest.mark.parametrize("passes", [[1], [1, 1, 1], [4, 4, 4, 4]])
def test_one_stutter_moves_no_cost_however_many_passes_it_had(passes: list[int]) -> None:
    costs = Costs(CPU_VERIFY, CPU_DRAFT)
    before = costs.draft_s(passes[0])
    costs.observe(1, costs.verify_s(1), passes, 5.0)
    for _ in range(8):
        costs.observe(1, costs.verify_s(1), [32], costs.draft_s(32))
    assert costs.draft_s(passes[0]) == pytest.approx(before, rel=0.02)


def test_a_short_table_learns_how_many_rows_cost_from_what_comes() -> None:
    """A target so slow that two sizes alone were measured, and neither took longer."""
    found = []
    slow = {rows: 40 * seconds for rows, seconds in CPU_VERIFY.items()}
    for planned in (
        CostPlanner(Costs({1: slow[1], 2: slow[1]}, CPU_DRAFT)),
        FixedPlanner(TreeConfig.parse("none")),
    ):
        world = World(
            lambda s: HEADS["bad"],
            Costs(slow, CPU_DRAFT),
            tokens=2000,
            calibration=Calibration() if isinstance(planned, CostPlanner) else None,
        )
        found.append(world.run(planned, 1))
    assert found[0] > 0.97 * found[1]


def test_calibration_finds_what_stated_probabilities_are_worth() -> None:
    """Of a head that is too sure of itself, from the trees that were drafted with it."""
    calibration, head = Calibration(), HEADS["too sure of itself"]
    world = World(lambda s: head, Costs(GPU_VERIFY, GPU_DRAFT), tokens=3000, calibration=calibration)
    world.run(CostPlanner(Costs(GPU_VERIFY, GPU_DRAFT)), 1)
    for chance in (0.3, 0.6, 0.9):
        stated = head.stated(chance)
        assert abs(stated - chance) > 0.04
        assert calibration.probability(1, stated) == pytest.approx(chance, abs=0.06)
