"""`plan ui`: the planner in a browser. Slow imports are within `show_ui`."""

import importlib.util
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from planner.commands import shared_options
from planner.errors import InputError

# Addresses of this machine for itself: no other machine can connect to a server that listens there.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
BLUE = "#0072b2"
# The dark theme has the colours of the dark report (reports/page.css).
LIGHT_BLUE, DARK_PAGE, DARK_CARD, DARK_INK = "#56b4e9", "#12161c", "#1a2029", "#e6eaf0"
INK = "#0d1117"  # So dark that captions, which have 60 % opacity, have a contrast of 4.5.


def show_ui(
    folder: Annotated[
        Path, typer.Option("--folder", readable=False, help="Where plans and uploaded traces are kept.")
    ] = Path("plans"),
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8501,
    catalog: shared_options.CatalogOption = None,
) -> None:
    """Open the planner in a browser: plan, what if, compare, schedule, prefixes, validation.

    Listens on this machine alone. There is no password: whoever reaches another --host may use it, and see
    what is kept in the folder.
    """
    if importlib.util.find_spec("streamlit") is None:
        raise InputError("plan ui needs Streamlit: pip install 'fleetplan[ui]'")
    from planner.documents.catalog import read_catalog

    # Imported by name: the room `ui` is above the commands (docs/architecture.md).
    store = import_module("ui.store")
    ui_folder = Path(store.__file__ or "").resolve().parent
    store.Store(folder)  # Raises now if the folder cannot be used.
    read_catalog(catalog)  # Raises now if the catalog is not valid.
    if host not in LOOPBACK:
        typer.echo(f"plan: listening on {host} without a password", err=True)
    settings = {
        "server.address": host,
        "server.port": port,
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "theme.light.primaryColor": BLUE,
        "theme.dark.primaryColor": LIGHT_BLUE,
        "theme.dark.backgroundColor": DARK_PAGE,
        "theme.dark.secondaryBackgroundColor": DARK_CARD,
        "theme.dark.textColor": DARK_INK,
        "theme.light.textColor": INK,
        "theme.headingFontSizes": '["1.9rem", "1.35rem", "1.15rem"]',
        "theme.metricValueFontSize": "1.4rem",
        "theme.paddingTop": "1rem",
    }
    os.environ["FLEETPLAN_UI_FOLDER"] = str(folder.resolve())
    if catalog is not None:
        os.environ["FLEETPLAN_UI_CATALOG"] = str(catalog.resolve())
    # PYTHONSAFEPATH prevents that a file ui.py in the working folder is imported in place of the package
    # `ui`. It also hides the packages of a clone that is not installed, so PYTHONPATH names the folder of
    # `ui`.
    os.environ["PYTHONSAFEPATH"] = "1"
    paths = (str(ui_folder.parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    options = [f"--{key}={value}" for key, value in settings.items()]
    os.execv(
        sys.executable, [sys.executable, "-m", "streamlit", "run", str(ui_folder / "serving.py"), *options]
    )
