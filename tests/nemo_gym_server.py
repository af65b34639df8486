"""A resources server out of the package nemo-gym, alone, run by the interpreter that has it: `python nemo_gym_server.py PORT MODULE
CLASS`."""

import importlib
import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient

port, name, server = int(sys.argv[1]), sys.argv[2], sys.argv[3]
module = importlib.import_module(f"resources_servers.{name}.app")
config = getattr(module, f"{server}Config")(host="127.0.0.1", port=port, entrypoint="app.py", name=name, domain="agent")
# These two environments call no other server; the client to others is all that stands aside.
app = getattr(module, server)(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()
uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
