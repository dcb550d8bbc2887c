"""Events and files from workers to the driver, over one authenticated TCP connection for each worker.

One channel serves every launcher that starts processes, on any node: no shared storage, no polling, no queue of the
launcher's own. `multiprocessing.connection` does framing and authentication (HMAC with a random key); messages are
JSON and raw bytes, never pickle.
"""
