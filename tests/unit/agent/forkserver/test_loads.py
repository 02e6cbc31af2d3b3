"""Which modules are left out when some are unsuitable, and by which imports the others come."""

from __future__ import annotations

from elaunch.agent.forkserver.loads import Load, select
from elaunch.agent.forkserver.selection import Cost, Selection, together


def package() -> list[Load]:
    """`base` needs nobody; `app` loads `base.deep`, `app.bad` and `app.after`, which asks for `app.bad` again."""
    deep = Load("base.deep", own_s=1)
    base = Load("base", loads=[deep], asked={"base.deep"}, own_s=1)
    bad = Load("app.bad", why="looks up RANK", own_s=2)
    other = Load("other", loads=[Load("optional", is_gone=True)], asked={"base", "optional"}, own_s=4)
    after = Load("app.after", loads=[other], asked={"app.bad", "other"}, own_s=8)
    asked = {"base", "app.bad", "app.after"}
    return [Load("app", loads=[base, bad, after], asked=asked, own_s=16)]


def test_those_that_asked_for_it_go_with_it_and_what_they_need_stays() -> None:
    selection = select(package())

    assert selection.left_out == ("app", "app.after", "app.bad")
    assert selection.entries == ("base", "other")
    assert selection.reasons == ("app.bad looks up RANK",)
    assert selection.left_out_s == 26
    assert selection.costs == (Cost("other", 4), Cost("base", 2), Cost("optional", 0))
    assert selection.saved_s == 6


def test_without_an_unsuitable_module_the_import_is_the_whole_one() -> None:
    roots = package()
    roots[0].loads[1].why = ""

    selection = select(roots)

    assert (selection.entries, selection.left_out, selection.reasons) == (("app",), (), ())


def test_the_modules_of_a_package_that_is_left_out_go_with_it() -> None:
    inner = Load("app.inner", asked={"base"})
    roots = [Load("app", asked={"app.inner"}, loads=[inner], why="starts a thread"), Load("base")]

    selection = select(roots)

    assert selection.left_out == ("app", "app.inner")
    assert selection.entries == ("base",)


def test_what_is_left_out_already_goes_with_its_users_and_is_not_named_again() -> None:
    roots = package()
    roots[0].loads[1].why = ""

    selection = select(roots, {"app.bad"})

    assert selection.left_out == ("app", "app.after", "app.bad")
    assert selection.reasons == ()


def test_two_selections_are_one_after_the_other() -> None:
    first = Selection(("a", "b"), ("x",), ("x starts a thread",), 1, (Cost("a", 1),))
    second = Selection(("b", "c"), ("w", "x"), (), 2, (Cost("c", 3), Cost("a", 1)))

    both = together(first, second)

    assert both == Selection(("a", "b", "c"), ("w", "x"), ("x starts a thread",), 3, (Cost("c", 3), Cost("a", 2)))


def test_a_module_whose_import_failed_is_no_entry() -> None:
    roots = [Load("app", asked={"gone"}, loads=[Load("gone", is_gone=True)], why="keeps a file open")]

    assert select(roots).entries == ()
