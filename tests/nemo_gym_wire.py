"""A server that speaks a NeMo-Gym resources server's HTTP, written from its wire format: `python nemo_gym_wire.py PORT`. The number
of the session's row can be looked up; it is the answer."""

import asyncio
import itertools
import sys

from aiohttp import web

sessions: dict[str, int] = {}
names = itertools.count()


async def seed_session(request: web.Request) -> web.Response:
    response, name = web.json_response({}), f"s{next(names)}"
    sessions[name] = (await request.json())["number"]
    response.set_cookie("session", name)
    return response


async def look_up(request: web.Request) -> web.Response:
    body = await request.json()
    if not isinstance(body.get("what"), str):
        return web.json_response({"detail": [{"loc": ["body", "what"], "msg": "Field required"}]}, status=422)
    if body["what"] == "boom":
        return web.Response(text="Internal Server Error", status=500)
    if body["what"] != "number":
        return web.json_response({"detail": f"there is no {body['what']}"}, status=404)
    return web.json_response({"number": sessions[request.cookies["session"]]})


async def verify(request: web.Request) -> web.Response:
    body = await request.json()
    output = body["response"]["output"]
    if body["number"] == 13:
        return web.json_response({"note": "no reward"})
    calls = [item for item in output if item["type"] == "function_call"]
    assert {item["call_id"] for item in calls} == {i["call_id"] for i in output if i["type"] == "function_call_output"}
    said = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    right = bool(said) and said[-1] == str(sessions[request.cookies["session"]])
    return web.json_response(body | {"reward": float(right), "calls": len(calls), "whole": True})


async def main(port: int) -> None:
    app = web.Application()
    app.add_routes(
        [web.post("/seed_session", seed_session), web.post("/look_up", look_up), web.post("/verify", verify)]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
