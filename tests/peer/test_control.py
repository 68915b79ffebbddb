"""The control API over real loopback sockets: what it answers, and whom it refuses."""

import os
import socket
import stat
from collections.abc import AsyncIterator
from typing import Any, Protocol

import aiohttp
import pytest

from dugnad.peer.control import REQUEST_BYTES_MAX, ControlServer
from dugnad.peer.errors import UserError
from dugnad.peer.paths import DaemonFile, Home
from dugnad.peer.views import DaemonView, Status

pytestmark = pytest.mark.slow


class View(DaemonView, Protocol):
    """The fixture's daemon in memory, with what it remembers."""

    left: list[bool]


@pytest.fixture
async def server(view: View, home: Home) -> AsyncIterator[ControlServer]:
    """A control server of the daemon in memory."""
    control = ControlServer(view, home)
    await control.start()
    yield control
    await control.close()


async def ask(
    server: ControlServer,
    home: Home,
    path: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    data: bytes | None = None,
) -> tuple[int, Any]:
    """Status and JSON of one request with the token, unless `headers` replace it. Any: JSON."""
    token = home.control_token.read_text()
    sent = {"Authorization": f"Bearer {token}"} | (headers or {})
    if method == "POST" and "Content-Type" not in sent:
        sent["Content-Type"] = "application/json"
    url = f"http://127.0.0.1:{server.port}{path}"
    async with aiohttp.ClientSession() as session:
        answer = await session.request(method, url, headers=sent, data=data)
        return answer.status, await answer.json()


async def test_it_tells_where_it_is_and_keeps_its_token_private(
    server: ControlServer, home: Home
) -> None:
    found = DaemonFile.read(home)
    assert found is not None
    assert (found.pid, found.port) == (os.getpid(), server.port)
    assert stat.S_IMODE(home.control_token.stat().st_mode) == 0o600


async def test_each_view_is_answered_as_json(server: ControlServer, home: Home) -> None:
    status, body = await ask(server, home, "/v1/status")
    assert status == 200
    assert body["anchor_loss"] == 2.5
    assert body["train_loss"] is None
    assert (await ask(server, home, "/v1/peers"))[1][0]["name"] == "ærlig"
    assert (await ask(server, home, "/v1/leaderboard"))[1]["rows"][0]["rank"] == 1
    assert (await ask(server, home, "/v1/units"))[1]["open"] == 3
    assert [row["n"] for row in (await ask(server, home, "/v1/events"))[1]] == [7]
    assert (await ask(server, home, "/v1/events?since=7"))[1] == []


@pytest.mark.parametrize("since", ["-1", "x", "1e3", "%D9%A3", "9" * 30])
async def test_a_wrong_event_number_is_refused(
    server: ControlServer, home: Home, since: str
) -> None:
    assert (await ask(server, home, f"/v1/events?since={since}"))[0] == 400


async def test_leaving_is_a_post_with_json(server: ControlServer, home: Home, view: View) -> None:
    async def post(data: bytes | None, headers: dict[str, str] | None = None) -> int:
        path = "/v1/leave"
        return (await ask(server, home, path, method="POST", headers=headers, data=data))[0]

    assert await post(None) == 200
    assert await post(b'{"drain": true}') == 200
    assert view.left == [False, True]
    assert (await ask(server, home, "/v1/leave"))[0] == 405
    for body in (b"{", b"[]", b'{"drain": 1}', b'{"drain": true, "more": 1}', b"[" * 9999):
        assert await post(body) == 400
    assert await post(b"drain=1", {"Content-Type": "application/x-www-form-urlencoded"}) == 415
    assert await post(bytes(REQUEST_BYTES_MAX + 1)) == 413
    assert view.left == [False, True]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer ä"}, 401),
        ({"Authorization": "Basic x"}, 401),
        ({"Authorization": ""}, 401),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_strangers_and_web_pages_are_refused(
    server: ControlServer, home: Home, view: View, headers: dict[str, str], status: int
) -> None:
    assert (await ask(server, home, "/v1/status", headers=headers))[0] == status
    posted = await ask(server, home, "/v1/leave", method="POST", headers=headers)
    assert posted[0] == status
    assert view.left == []


async def test_the_names_of_this_machine_are_accepted(server: ControlServer, home: Home) -> None:
    own = {"Host": f"localhost:{server.port}", "Origin": f"http://localhost:{server.port}"}
    assert (await ask(server, home, "/v1/status", headers=own))[0] == 200


async def test_an_unknown_path_is_a_json_404_for_those_with_the_token_only(
    server: ControlServer, home: Home
) -> None:
    status, body = await ask(server, home, "/v1/pause")
    assert (status, set(body)) == (404, {"error"})
    assert (await ask(server, home, "/", headers={"Authorization": ""}))[0] == 401


async def test_no_answer_carries_a_cors_header(server: ControlServer) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/leave"
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    async with aiohttp.ClientSession() as session:
        answer = await session.options(url, headers=headers)
        assert answer.status == 403
        assert not [h for h in answer.headers if h.lower().startswith("access-control")]


async def test_it_listens_on_loopback_only(server: ControlServer) -> None:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        with pytest.raises(OSError, match="refused"):
            probe.connect(("127.0.0.2", server.port))


async def test_a_taken_port_is_its_own_error(
    server: ControlServer, view: View, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Home(tmp_path_factory.mktemp("other"))
    with pytest.raises(UserError) as caught:
        await ControlServer(view, other, server.port).start()
    assert caught.value.number == "E018"
    assert DaemonFile.read(other) is None


async def test_closing_removes_its_traces_and_frees_the_port(view: View, home: Home) -> None:
    control = ControlServer(view, home)
    await control.start()
    port = control.port
    await control.close()
    await control.close()
    assert not home.daemon_file.exists()
    assert not home.control_token.exists()
    again = ControlServer(view, home, port)
    await again.start()
    await again.close()


async def test_each_daemon_has_a_new_token(view: View, home: Home) -> None:
    tokens = set()
    for _ in range(2):
        control = ControlServer(view, home)
        await control.start()
        tokens.add(home.control_token.read_text())
        await control.close()
    assert len(tokens) == 2


async def test_a_view_that_fails_is_a_500_and_nothing_more(
    server: ControlServer, home: Home, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Status:
        raise KeyError("missing")

    monkeypatch.setattr(view, "status", fail)
    token = home.control_token.read_text()
    url = f"http://127.0.0.1:{server.port}/v1/status"
    async with aiohttp.ClientSession() as session:
        answer = await session.get(url, headers={"Authorization": f"Bearer {token}"})
        assert answer.status == 500
        assert "missing" not in await answer.text()
    assert (await ask(server, home, "/v1/peers"))[0] == 200
