"""`specfw plugins`: what is installed, what it offers, what is broken."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from specfw.cli.options import JsonOutput, print_json
from specfw.plugins import PluginManager

__all__ = ["NAME", "command"]

NAME = "plugins"


def command(as_json: JsonOutput = False) -> None:
    """List plugins and their components, and say what is broken and why."""
    found = PluginManager().describe()
    if as_json:
        print_json(found)
        return
    console = Console()
    table = Table("plugin", "version", "components")
    for plugin in found["plugins"]:
        offered = ", ".join(f"{one['kind']} {one['name']}" for one in plugin["components"])
        table.add_row(plugin["name"], plugin["version"] or "", offered)
    console.print(table)
    for broken in found["broken"]:
        console.print(
            f"broken: {broken['name']} ({broken['stage']}): {broken['error']}",
            style="red",
            markup=False,
        )
    for left in found["filtered"]:
        console.print(f"left out by SPECFW_PLUGINS: {left['name']}", markup=False)
    for conflict in found["conflicts"]:
        owners = " and ".join(conflict["owners"])
        console.print(
            f"conflict: {conflict['kind']} {conflict['name']} is offered by {owners}", style="red"
        )
