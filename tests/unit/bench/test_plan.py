"""bench.plan, bench.contenders: who is measured, and when."""

from __future__ import annotations

from bench.job import ALL, ELAUNCH, FRESH_STORE, TORCHRUN, environment
from bench.plan import Settings, plan


def settings(*sections: str, samples: int = 3) -> Settings:
    return Settings(samples, (1, 2), (8, 256), tuple(ALL.values()), sections, limit_s=40, seed=1)


def test_contenders_take_turns_in_every_round() -> None:
    tasks = plan(settings("start"))

    rounds = list(dict.fromkeys(t.round for t in tasks))
    assert rounds == [f"start, round {n} of 3" for n in (1, 2, 3)]
    keys = [[t.key for t in tasks if t.round == name] for name in rounds]
    assert keys[0] == keys[1] == keys[2]
    assert len(keys[0]) == len(set(keys[0])) == 2 + 4 * 2


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
