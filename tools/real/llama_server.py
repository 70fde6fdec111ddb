"""One llama.cpp server on 127.0.0.1, from the wheel xllamacpp: llama_server.py MODEL PORT SLOTS CONTEXT

Each slot keeps the KV cache of its last prompt, CONTEXT / SLOTS tokens at most; there is no other
cache. Answers are greedy, so that they depend on the prompt alone. Ends by SIGTERM or SIGINT.
"""

import signal
import sys

import xllamacpp

ENDS = {signal.SIGTERM, signal.SIGINT}

model, port, slots, context = sys.argv[1], *map(int, sys.argv[2:])
# Before the server starts its threads: they inherit it, and one of them would get the signal.
signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)

params = xllamacpp.CommonParams()
params.model.path = model
params.model_alias = {"tiny"}
params.hostnames = ["127.0.0.1"]
params.port = port
params.n_parallel = slots
params.n_ctx = context
# Several engines share the machine's cores.
params.cpuparams.n_threads = 1
params.cpuparams_batch.n_threads = 1
params.n_threads_http = slots + 2
params.n_gpu_layers = 0
# The wheel's default is 8 GiB of prompts outside of the slots, in which nothing is ever evicted.
params.cache_ram_mib = 0
params.sampling.temp = 0.0
params.endpoint_metrics = True
params.warmup = False
params.ui = False

server = xllamacpp.Server(params)
print("listening on", server.listening_address, flush=True)
signal.sigwait(ENDS)
del server
