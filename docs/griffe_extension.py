"""What Griffe, which reads the reference from the sources, would take otherwise than Python does."""

from typing import Any

import griffe


class Reference(griffe.Extension):
    """Finds functions whose module has their name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let each public name that seems to be a module be what that module defines under the name.

        Python does so for ``from fp8core.ops import quantize``, as ``fp8core.ops`` has imported the function.
        """
        for name in map(str, pkg.exports or ()):
            member = pkg.members[name]
            if isinstance(member, griffe.Alias) and member.is_module:
                pkg.set_member(name, griffe.Alias(name, f"{member.target_path}.{name}", parent=pkg))
