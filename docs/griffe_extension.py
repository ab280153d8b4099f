"""What Griffe, which reads the reference from the sources, would take otherwise than Python and its readers do."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Reference(griffe.Extension):
    """Finds functions whose module has their name, and shows examples as code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let each public name that seems to be a module be what that module defines under the name.

        Python does so for ``from fp8core.ops import quantize``, as ``fp8core.ops`` has imported the function.
        """
        for name in map(str, pkg.exports or ()):
            member = pkg.members[name]
            if isinstance(member, griffe.Alias) and member.is_module:
                pkg.set_member(name, griffe.Alias(name, f"{member.target_path}.{name}", parent=pkg))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Call the section of an example by the only name that Griffe takes for code."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub("Examples:", obj.docstring.value)
