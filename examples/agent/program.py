"""A program that plays the policy's seats with OpenAI's client: a turn's messages go to the policy
as they are, and its answer is the move. It waits for a run, and ends with it.

    pip install openai
    export SELFPLAY_SEAT_KEY=any-secret
    python examples/agent/program.py &
    python train.py --config configs/tiny.yaml out=runs/agent rollout.player=endpoint_seat
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from openai import OpenAI

URL = f"http://127.0.0.1:{os.environ.get('SELFPLAY_SEAT_PORT', '8765')}/v1"
KEY = os.environ.get("SELFPLAY_SEAT_KEY") or sys.exit("SELFPLAY_SEAT_KEY must be the run's")


def play(client, turn):
    """The move for one turn. The client has the game's key."""
    answer = client.chat.completions.create(model=turn["model"], messages=turn["messages"])
    return answer.choices[0].message.content


def work(play):
    """Take turns until the run is gone."""
    connected = False
    # Games share its connections; one client for each game would keep thousands open.
    with httpx.Client(timeout=60) as http, OpenAI(base_url=URL, api_key="each game's") as client:
        while True:
            try:
                got = http.get(f"{URL}/turn", headers={"Authorization": f"Bearer {KEY}"})
                connected = True
                if got.status_code == 204:  # no turn for a while
                    continue
                if got.status_code != 200:
                    sys.exit(got.text)
                turn = got.json()
                key = turn["key"]
                try:
                    move = {"move": play(client.with_options(api_key=key), turn)}
                except Exception as error:  # noqa: BLE001
                    move = {"error": repr(error)}  # the game is aborted
                http.post(f"{URL}/move", json=move, headers={"Authorization": f"Bearer {key}"})
            except httpx.TransportError:
                if connected:
                    return
                time.sleep(0.5)  # the run has not started


def serve(play, games=16):
    """Play this number of games at once."""
    with ThreadPoolExecutor(games) as pool:
        list(pool.map(work, [play] * games))


if __name__ == "__main__":
    serve(play)
