"""HTTP callbacks at the time you choose: the task `http.call`, signed, retried, and safe.

callbacks = Callbacks(app, keys=["whsec_…"])
await callbacks.using(delay="30m").call("https://api.example.com/hooks", body={"order": 42})
"""

from tickwheel.callbacks.addresses import refusal
from tickwheel.callbacks.answers import Answer
from tickwheel.callbacks.api import Callback, Callbacks

__all__ = ["Answer", "Callback", "Callbacks", "refusal"]
