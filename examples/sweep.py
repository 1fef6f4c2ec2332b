"""What a promise costs: the cheapest fleet for one limit after another, drawn. Cells of a notebook.

python examples/sweep.py        writes sweep.html and prints the table
"""

# %% The question and its traffic, read once
import altair as alt
import pandas as pd

import fleetplan

only = {"fleet.gpus": {"h100-80g": 32}, "fleet.sold_as": {"h100-80g": "gpu"}}  # one kind, rented one by one
task = fleetplan.read_task("examples/slo.yaml").replace(only)
trace = fleetplan.read_trace("examples/traces/azure-conversation-sample.csv")

# %% One plan per limit; a limit that no fleet keeps has no cost
rows = []
for limit_s in (0.25, 0.5, 1.0, 2.0):
    asked = fleetplan.replace(task, "slo.ttft.p90", f"{limit_s} s")
    try:
        found = fleetplan.plan(asked, trace)
    except fleetplan.InfeasibleError as error:
        print(f"TTFT p90 of {limit_s} s: {error}")
        continue
    rows.append({"ttft_p90_s": limit_s, "cost_usd_per_h": found.cost_usd_per_h, "workers": found.workers})

table = pd.DataFrame(rows)
print(table.to_string(index=False))

# %% Cost against the limit
chart = (
    alt.Chart(table, title="What a tighter first token costs")
    .mark_line(interpolate="step-before", point=True)
    .encode(
        alt.X("ttft_p90_s", title="TTFT p90 [s]", scale=alt.Scale(type="log")),
        alt.Y("cost_usd_per_h", title="cheapest fleet [USD/h]"),
        tooltip=["ttft_p90_s", "cost_usd_per_h", "workers"],
    )
)
chart.save("sweep.html", inline=True)
chart  # noqa: B018 - a notebook shows it
