"""The SDK: `Client` and `AsyncClient` for a running daemon.

Responses are the structs of the modules of `coserve.core.schemas`, errors are exceptions of `coserve.core.errors`.

    with coserve.Client() as client:
        job = client.finetune("pirate", [{"prompt": "Hello", "completion": "Ahoy!"}], lora={"r": 8})
        job.wait()
        print(client.generate("Hello", adapter="pirate").choices[0].text)
"""

from coserve.client.asynchronous import AsyncClient
from coserve.client.caller import RetryPolicy
from coserve.client.handles import AsyncJobHandle
from coserve.client.options import GenerateOptions
from coserve.client.synchronous import Client, JobHandle, TrainingSession
from coserve.client.training import AsyncTrainingSession
from coserve.client.transport import HttpTransport, MockTransport, Request, Response, Transport, Upload

__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "AsyncTrainingSession",
    "Client",
    "GenerateOptions",
    "HttpTransport",
    "JobHandle",
    "MockTransport",
    "Request",
    "Response",
    "RetryPolicy",
    "TrainingSession",
    "Transport",
    "Upload",
]
