"""`dataclass`, as the standard library's, for frozen records. It is quicker to define, so elaunch starts sooner.

The standard library compiles six methods for each class. elaunch imports over a hundred records before it starts the
first worker, and this was a third of that time. Here only `__init__` is compiled, and only when the first record of its
class is made: in a short job that is every second class. The other methods are closures, or shared by all classes.

It knows what elaunch's records use: fields with defaults, factories and `kw_only`. It refuses the other options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from dataclasses import MISSING
    from operator import attrgetter

    def dataclass(*, frozen, kw_only=False):
        """`dataclasses.dataclass(frozen=True)`. The records are made, equal, hashed and shown as theirs are.

        A subclass that is no record cannot be changed either. The standard library sees no frozen class here.
        """
        assert frozen

        def define(cls):
            assert not {"__setattr__", "__delattr__", "__init__"} & set(vars(cls)), f"{cls.__name__} has its own"
            # The standard library would write the signature of a class without one; it takes longer than all the rest.
            cls.__doc__ = cls.__doc__ or f"{cls.__name__}(…)"
            cls = dataclasses.dataclass(cls, init=False, eq=False, repr=False, kw_only=kw_only)
            fields = dataclasses.fields(cls)
            assert len(fields) == len(cls.__dataclass_fields__), f"{cls.__name__} has an InitVar or a ClassVar"
            assert all(field.init for field in fields), f"{cls.__name__} has a field that is not given"
            compared = [field.name for field in fields if field.compare]
            values = attrgetter(*compared) if compared else lambda _: ()

            def init(self, *args, **kwargs):
                cls.__init__ = compiled = _init(cls, fields)
                compiled(self, *args, **kwargs)

            def is_equal(self, other):
                return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

            def hashed(self):
                return hash(values(self))

            def shown(self):
                shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields if field.repr)
                return f"{self.__class__.__qualname__}({shown})"

            methods = {"__init__": init, "__eq__": is_equal, "__hash__": hashed, "__repr__": shown}
            for name, method in methods.items():
                # A method that the class defines itself stays. `__hash__` is None beside an `__eq__` of its own.
                if cls.__dict__.get(name) is None:
                    setattr(cls, name, method)
            cls.__setattr__, cls.__delattr__ = _refuse_assignment, _refuse_deletion
            return cls

        return define

    def _refuse_assignment(self, name, value):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_deletion(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def _init(cls, fields):
        """Compile `__init__`: what it assigns, it assigns past `__setattr__`."""
        scope = {"__assign": object.__setattr__, "__missing": MISSING}
        positional, named, body = ["self"], [], []
        for field in fields:
            name, parameter, value = field.name, field.name, field.name
            if field.default is not MISSING:
                scope[f"__default_{name}"] = field.default
                parameter = f"{name}=__default_{name}"
            elif field.default_factory is not MISSING:
                scope[f"__make_{name}"] = field.default_factory
                parameter, value = f"{name}=__missing", f"__make_{name}() if {name} is __missing else {name}"
            (named if field.kw_only else positional).append(parameter)
            body.append(f"__assign(self, {name!r}, {value})")
        if hasattr(cls, "__post_init__"):
            body.append("self.__post_init__()")
        parameters = ", ".join([*positional, "*", *named] if named else positional)
        exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), scope)
        made = scope["__init__"]
        made.__qualname__ = f"{cls.__qualname__}.__init__"
        return made
