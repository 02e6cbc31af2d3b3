"""`dataclass`, as the standard library's, for frozen records. It is quicker to define, so elaunch starts sooner.

The standard library compiles six methods for each class. elaunch imports over a hundred records before it starts the
first worker, and this was a third of that time. Here `__eq__`, `__hash__` and `__repr__` are closures: three fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from operator import attrgetter

    def dataclass(*, frozen, **options):
        """`dataclasses.dataclass(frozen=True)`. The records are equal, hashed and shown as theirs are."""
        assert frozen

        def define(cls):
            cls = dataclasses.dataclass(cls, frozen=True, eq=False, repr=False, **options)
            fields = dataclasses.fields(cls)
            compared = [field.name for field in fields if field.compare]
            values = attrgetter(*compared) if compared else lambda _: ()

            def is_equal(self, other):
                return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

            def hashed(self):
                return hash(values(self))

            def shown(self):
                shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields if field.repr)
                return f"{self.__class__.__qualname__}({shown})"

            for name, method in (("__eq__", is_equal), ("__hash__", hashed), ("__repr__", shown)):
                # A method that the class defines itself stays. `__hash__` is None beside an `__eq__` of its own.
                if cls.__dict__.get(name) is None:
                    setattr(cls, name, method)
            return cls

        return define
