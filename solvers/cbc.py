"""CBC, the integer solver that comes with PuLP."""

from typing import Any

__all__ = ["cbc"]


def cbc(**options: Any) -> Any:
    """PuLP's bundled CBC, silent; `options` as `pulp.COIN_CMD` takes them."""
    import pulp

    return pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, **options)
