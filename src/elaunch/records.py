"""`dataclass`, `field`, `replace` and `asdict`, as the standard library's, for elaunch's records: it starts sooner.

The standard library's module takes 5 ms to import, mostly for `inspect`, and compiles six methods for each class.
elaunch defines over a hundred records before its first worker runs. Here only `__init__` is compiled, and only for a
class of which several records are made: in a short job that is every tenth. Its first records are filled in field by
field. The other methods are closures, or shared by all classes.

It knows what elaunch's records use: fields with defaults, factories, `repr`, `compare` and `kw_only`. It refuses the
rest. The standard library's functions take a record for one of its own, see `_Standard`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


def is_record(kind: object) -> bool:
    """Whether `kind` is a class of records, or one record."""
    return hasattr(kind, "__record_fields__")


if TYPE_CHECKING:
    from dataclasses import asdict as asdict
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:
    from operator import attrgetter

    # The value of a field that is not given, and has no default.
    MISSING = type("Missing", (), {"__repr__": lambda _: "<missing>"})()
    # To compile an `__init__` takes as long as to fill in a hundred records. Few classes have more than ten in a short
    # job, and one that has many loses a tenth of that time.
    _FILLED_IN = 10
    # These texts are what a class's annotations hold: all of elaunch's are texts.
    _NO_FIELDS = ("ClassVar", "InitVar", "KW_ONLY")

    class Field:
        """What a class says of one of its fields."""

        __slots__ = ("compare", "default", "default_factory", "kw_only", "name", "repr", "type")

        def __init__(self, default, default_factory, repr, compare, kw_only):
            self.default, self.default_factory = default, default_factory
            self.repr, self.compare, self.kw_only = repr, compare, kw_only

    def field(*, default=MISSING, default_factory=MISSING, repr=True, compare=True, kw_only=None):
        """As `dataclasses.field`."""
        return Field(default, default_factory, repr, compare, kw_only)

    def replace(record, /, **changes):
        """As `dataclasses.replace`."""
        fields = record.__record_fields__
        return record.__class__(**{name: getattr(record, name) for name in fields.keys() - changes.keys()}, **changes)

    def asdict(record):
        """As `dataclasses.asdict`, for records whose values are plain, records, or tuples, lists and dicts of these."""
        return {name: _as_plain(getattr(record, name)) for name in record.__record_fields__}

    def dataclass(cls=None, /, *, frozen=False, kw_only=False):
        """`dataclasses.dataclass`. The records are made, equal, hashed and shown as theirs are.

        A subclass of a frozen class cannot be changed either, if it is no class of records itself.
        """
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, kw_only=kw_only)
        assert not {"__setattr__", "__delattr__", "__init__"} & set(vars(cls)), f"{cls.__name__} has its own"
        fields = _fields(cls, kw_only)
        compared = [each.name for each in fields.values() if each.compare]
        values = attrgetter(*compared) if compared else lambda _: ()

        positional = [each.name for each in fields.values() if not each.kw_only]
        left = _FILLED_IN

        def init(self, *args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0 or not _fill_in(self, positional, args, kwargs):
                cls.__init__ = compiled = _init(cls, fields.values(), frozen)
                compiled(self, *args, **kwargs)

        def is_equal(self, other):
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        def hashed(self):
            return hash(values(self))

        methods = {"__init__": init, "__eq__": is_equal, "__hash__": hashed if frozen else None, "__repr__": _shown}
        for name, method in methods.items():
            # A method that the class defines itself stays. `__hash__` is None beside an `__eq__` of its own.
            if cls.__dict__.get(name) is None:
                setattr(cls, name, method)
        if frozen:
            cls.__setattr__, cls.__delattr__ = _refuse_assignment, _refuse_deletion
        cls.__record_fields__ = fields
        cls.__match_args__ = tuple(positional)
        cls.__dataclass_fields__ = _Standard()
        return cls

    def _fields(cls, kw_only):
        """The class's fields by name: first those of the records that it extends."""
        fields = {}
        for base in reversed(cls.__mro__[1:]):
            fields.update(vars(base).get("__record_fields__", ()))
        for name, annotation in cls.__annotations__.items():
            assert not str(annotation).startswith(_NO_FIELDS), f"{cls.__name__}.{name} is no field"
            given = cls.__dict__.get(name, MISSING)
            each = given if isinstance(given, Field) else field(default=given)
            # The standard library's field is none of these. An object that can change would be shared by all records.
            is_fit = each.default.__class__.__name__ != "Field" and each.default.__class__.__hash__
            assert is_fit, f"{cls.__name__}.{name} has no such default"
            each.name, each.type = name, annotation
            each.kw_only = kw_only if each.kw_only is None else each.kw_only
            fields[name] = each
            if each.default is not MISSING:
                setattr(cls, name, each.default)
            elif given is not MISSING:
                delattr(cls, name)
        return fields

    def _shown(self):
        shown = [f"{each.name}={getattr(self, each.name)!r}" for each in self.__record_fields__.values() if each.repr]
        return f"{self.__class__.__qualname__}({', '.join(shown)})"

    def _refuse_assignment(self, name, value):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_deletion(self, name):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _fill_in(record, positional, args, kwargs):
        """What the compiled `__init__` does. False if the arguments are not right: that one says what is wrong."""
        given = dict(zip(positional, args, strict=False))
        if len(args) > len(positional) or given.keys() & kwargs.keys():
            return False
        given.update(kwargs)
        for name, each in record.__record_fields__.items():
            if name in given:
                value = given.pop(name)
            elif each.default is not MISSING:
                value = each.default
            elif each.default_factory is not MISSING:
                value = each.default_factory()
            else:
                return False
            object.__setattr__(record, name, value)
        if given:
            return False
        if hasattr(record, "__post_init__"):
            record.__post_init__()
        return True

    def _init(cls, fields, frozen):
        """Compile `__init__`. Of a frozen class it assigns past `__setattr__`."""
        scope = {"__assign": object.__setattr__, "__missing": MISSING}
        positional, named, body = ["self"], [], []
        for each in fields:
            name, parameter, value = each.name, each.name, each.name
            if each.default is not MISSING:
                scope[f"__default_{name}"] = each.default
                parameter = f"{name}=__default_{name}"
            elif each.default_factory is not MISSING:
                scope[f"__make_{name}"] = each.default_factory
                parameter, value = f"{name}=__missing", f"__make_{name}() if {name} is __missing else {name}"
            (named if each.kw_only else positional).append(parameter)
            body.append(f"__assign(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
        if hasattr(cls, "__post_init__"):
            body.append("self.__post_init__()")
        parameters = ", ".join([*positional, "*", *named] if named else positional)
        exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), scope)
        made = scope["__init__"]
        made.__qualname__ = f"{cls.__qualname__}.__init__"
        return made

    def _as_plain(value):
        if is_record(value):
            return asdict(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return value.__class__(*map(_as_plain, value))
        if isinstance(value, (tuple, list)):
            return value.__class__(map(_as_plain, value))
        return {key: _as_plain(each) for key, each in value.items()} if isinstance(value, dict) else value

    class _Standard:
        """The fields as the standard library keeps them: its functions find them here. They are made when asked for."""

        def __get__(self, record, cls):
            import dataclasses

            names = ("default", "default_factory", "repr", "compare", "kw_only")
            made = []
            for each in cls.__record_fields__.values():
                said = {name: getattr(each, name) for name in names if getattr(each, name) is not MISSING}
                made.append((each.name, each.type, dataclasses.field(**said)))
            # Once for the class: making them takes 3 ms.
            cls.__dataclass_fields__ = found = dataclasses.make_dataclass(cls.__name__, made).__dataclass_fields__
            return found
