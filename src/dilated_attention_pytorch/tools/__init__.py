"""Looking at patterns, machines and live processes."""

from dilated_attention_pytorch.tools.diagnose import diagnose_oom_error, diagnose_performance_issues
from dilated_attention_pytorch.tools.memory import memory_cleanup, monitor_memory_realtime
from dilated_attention_pytorch.tools.profiling import benchmark_implementations, profile_memory_usage

__all__ = [
    "benchmark_implementations",
    "diagnose_oom_error",
    "diagnose_performance_issues",
    "memory_cleanup",
    "monitor_memory_realtime",
    "profile_memory_usage",
]
