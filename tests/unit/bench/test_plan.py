"""bench.plan, bench.contenders: who is measured, and when."""

from __future__ import annotations

from bench.contenders import ALL, ELAUNCH, FRESH_STORE, TORCHRUN, TORCHRUN_FORK, environment
from bench.plan import SECTIONS, Settings, chunks, plan


def settings(*sections: str, samples: int = 3) -> Settings:
    return Settings(samples, (1, 2), (8, 256), tuple(ALL.values()), sections, limit_s=40, seed=1)


def test_contenders_take_turns_in_every_round() -> None:
    tasks = plan(settings("start"))

    rounds = list(dict.fromkeys(t.round for t in tasks))
    assert rounds == [f"start, round {n} of 3" for n in (1, 2, 3)]
    keys = [[t.key for t in tasks if t.round == name] for name in rounds]
    assert keys[0] == keys[1] == keys[2]
    assert len(keys[0]) == len(set(keys[0])) == 2 + 4 * 2


def test_only_the_sections_that_were_asked_for_are_done_in_their_own_order() -> None:
    heads = list(dict.fromkeys(t.round.split(",")[0] for t in plan(settings("restart", "start"))))

    assert heads == ["start", "restart"]
    assert len({t.key for t in plan(settings(*SECTIONS))}) > 20


def test_restarts_are_taken_from_several_jobs() -> None:
    assert chunks(20, 5) == [5, 5, 5, 5]
    assert chunks(7, 5) == [5, 2]
    assert chunks(2, 5) == [2]


def test_of_many_agents_there_are_fewer_rounds() -> None:
    tasks = plan(settings("scale", samples=8))

    assert [t.key for t in tasks] == 2 * ["8 agents", "256 agents"]


def test_who_never_notices_the_loss_of_a_node_is_not_asked_often() -> None:
    keys = [t.key for t in plan(settings("nodes-loss", samples=20))]

    assert keys.count("loss of a node, elaunch") == 20
    assert keys.count("loss of a node, torchrun") == 3


def test_all_get_the_same_number_of_threads_and_nothing_of_a_launcher_above() -> None:
    inherited = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "7",
        "PET_TEE": "3",
        "ELAUNCH_LINK": "3",
        "TORCHELASTIC_RUN_ID": "a",
    }

    for contender in (ELAUNCH, TORCHRUN):
        assert environment(inherited, contender, {"A": "b"}) == {"PATH": "/bin", "OMP_NUM_THREADS": "1", "A": "b"}
    name, value = FRESH_STORE.split("=")
    assert environment(inherited, TORCHRUN.with_fresh_store(), {})[name] == value


def test_a_command_names_workers_and_restarts_before_the_script() -> None:
    assert TORCHRUN_FORK.command(4, 25) == (
        *("torchrun", "--run-path", "--start-method", "fork"),
        *("--nproc-per-node", "4", "--max-restarts", "25"),
    )
