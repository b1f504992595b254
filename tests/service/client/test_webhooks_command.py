"""`bottega webhooks`, `--webhook` and `bottega tenants webhook`, and what of these the SDK does."""

from __future__ import annotations

from pathlib import Path

from standardwebhooks import Webhook as Verifier

from bottega.client import AsyncClient, ReplayedWebhooks, Webhook
from bottega.rpc.security.tenant_file import read_tenants
from tests.support.terminal import run, run_at
from tests.support.waiting import eventually
from tests.support.webhook_receiver import SECRET, delivering, receiving


async def test_webhooks_are_asked_for_listed_and_replayed(tmp_path: Path) -> None:
    async with (
        receiving(SECRET) as receiver,
        delivering(tmp_path, give_up_s=0.1) as house,
        AsyncClient(house.address, fleet_address=house.fleet_address) as client,
    ):
        assert "No webhook waits." in (await run_at(house, "webhooks", "list")).output
        receiver.answer = lambda _: 500
        detached = await run_at(house, "generate", "a star", "--detach", "--webhook", receiver.url)
        job_id = detached.stdout.strip()
        other = await client.submit("a ring", webhook=Webhook(url=receiver.url, events=("job.completed",)))
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_webhooks_dead") == 2)
        page = await client.undelivered_webhooks(dead=True, page_size=1)
        assert (len(page.events), page.next_page_token != "") == (1, True)
        assert page.events[0].next_attempt_s is None
        listed = (await run_at(house, "webhooks", "list", "--dead")).output
        assert f"evt_{job_id}" in listed.replace("\n", "")
        assert "given up" in listed
        receiver.answer = lambda _: 200
        replayed = await run_at(house, "webhooks", "replay", f"evt_{job_id}")
        assert replayed.stdout == "1 event will be delivered now\n"
        assert await client.replay_webhooks(all_dead=True) == ReplayedWebhooks(replayed=1, damaged=0, left=0)
        await eventually(lambda: {delivery.data["job_id"] for delivery in receiver.accepted} == {job_id, other.id})
        assert (await run_at(house, "webhooks", "replay")).exit_code == 2
        assert (await run_at(house, "generate", "a star", "--webhook", receiver.url)).exit_code == 2


def test_a_tenants_webhook_and_secrets_are_set_shown_and_rotated(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    run("tenants", "add", "shop", "--file", file)
    first = run(
        "tenants", "webhook", "shop", "--url", "https://shop.example/hooks", "--event", "job.failed", "--file", file
    )
    secret = first.stdout.strip()
    (shop,) = read_tenants(file)
    assert (shop.webhooks.url, shop.webhooks.events) == ("https://shop.example/hooks", ("job.failed",))
    assert shop.webhooks.secrets == (secret,)
    Verifier(secret)
    assert secret not in run("tenants", "list", "--file", file).output
    both = run("tenants", "webhook", "shop", "--rotate", "--keep-old", "--file", file).stdout.strip()
    assert read_tenants(file)[0].webhooks.secrets == (both, secret)
    alone = run("tenants", "webhook", "shop", "--rotate", "--url", "", "--file", file).stdout.strip()
    assert read_tenants(file)[0].webhooks.secrets == (alone,)
    assert read_tenants(file)[0].webhooks.url == ""
    assert run("tenants", "webhook", "shop", "--keep-old", "--file", file).exit_code == 2
    assert run("tenants", "webhook", "other", "--file", file).exit_code == 2
    before = (tmp_path / "tenants.json").read_bytes()
    refused = run("tenants", "webhook", "shop", "--url", "shop.example/hooks", "--file", file)
    assert refused.exit_code != 0
    assert "must begin with https://" in refused.stderr.replace("\n", " ")
    assert (tmp_path / "tenants.json").read_bytes() == before
