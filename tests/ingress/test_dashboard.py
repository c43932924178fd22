"""The dashboard for Grafana asks for what a scrape has."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
SUFFIXES = {"counter": "_total", "histogram": "_bucket", "gauge": ""}


async def test_each_query_names_metrics_and_labels_that_a_scrape_has(open_front):
    async with open_front() as front:
        await front.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        page = (await front.http.get("/metrics")).text
    labels = {
        family.name + SUFFIXES[family.type]: {label for sample in family.samples for label in sample.labels}
        for family in text_string_to_metric_families(page)
        if family.type in SUFFIXES
    }
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]

    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"(?:vllm:|mooncake_)\w+", query)
        assert names, query
        for name in names:
            assert name in labels, query
            for by in re.findall(r"by \((.*?)\)", query):
                assert not labels[name] or set(by.split(", ")) <= labels[name], query
