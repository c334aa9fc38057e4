"""The flags of tritonserver, as data: which take a bool, which may be repeated.

`broker.options` accepts all of them; what each one means here, if anything, is decided there.
"""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """Flags written as one text."""
    return frozenset(text.split())


BOOLEAN = names(
    """
    log-info log-warning log-error exit-on-error disable-auto-complete-config strict-model-config strict-readiness
    model-namespacing enable-peer-access allow-client-shm
    allow-http reuse-http-port allow-grpc reuse-grpc-port grpc-use-ssl grpc-use-ssl-mutual
    grpc-keepalive-permit-without-calls
    allow-metrics allow-gpu-metrics allow-cpu-metrics
    allow-sagemaker sagemaker-safe-port-range allow-vertex-ai
    """
)
REPEATED = names(
    """
    model-repository model-store load-model backend-config cache-config metrics-config trace-config
    http-restricted-api grpc-restricted-protocol rate-limit-resource host-policy cuda-memory-pool-byte-size
    cuda-virtual-address-size model-load-gpu-limit trace-level
    """
)
SINGLE = names(
    """
    id log-verbose log-file log-format
    model-control-mode repository-poll-secs model-config-name model-load-thread-count model-load-retry-count
    backend-directory repoagent-directory cache-directory response-cache-byte-size
    exit-timeout-secs rate-limit min-supported-compute-capability buffer-manager-thread-count
    pinned-memory-pool-byte-size
    http-port http-address http-thread-count http-header-forward-pattern http-max-input-size
    grpc-port grpc-address grpc-header-forward-pattern grpc-infer-thread-count grpc-infer-allocation-pool-size
    grpc-max-response-pool-size grpc-infer-response-compression-level
    grpc-server-cert grpc-server-key grpc-root-cert
    grpc-keepalive-time grpc-keepalive-timeout grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes
    grpc-max-connection-age grpc-max-connection-age-grace
    metrics-port metrics-address metrics-interval-ms
    trace-file trace-rate trace-count trace-log-frequency
    sagemaker-port sagemaker-thread-count vertex-ai-port vertex-ai-thread-count vertex-ai-default-model
    """
)
