"""A Griffe extension for names that Griffe, which reads the sources, resolves differently from Python."""

from typing import Any

import griffe


class Reference(griffe.Extension):
    """Resolves functions whose module has the same name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Resolve each public name that seems to be a module to the member of that name in the module.

        Python resolves ``from fp8core.ops import quantize`` so, as ``fp8core.ops`` has imported the function.
        """
        for name in map(str, pkg.exports or ()):
            member = pkg.members[name]
            if isinstance(member, griffe.Alias) and member.is_module:
                pkg.set_member(name, griffe.Alias(name, f"{member.target_path}.{name}", parent=pkg))
