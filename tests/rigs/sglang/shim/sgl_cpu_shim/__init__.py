"""Test-only: lets HiCache's host pool work where 'device' is the CPU (no CUDA, no sgl_kernel)."""


def _pages(idx, page_size):
    return idx[::page_size] // page_size


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for s, d in zip(src_layers, dst_layers, strict=False):
        d[dst_indices] = s[src_indices].to(d.dtype)


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    # src: [k layers..., v layers...] each [tokens, heads, dim];
    # dst: [k_buf, v_buf] each [pages, layers, page, heads, dim]
    n = len(src_ptrs) // len(dst_ptrs)
    dp = _pages(dst_indices, page_size)
    for b, d in enumerate(dst_ptrs):
        for layer in range(n):
            s = src_ptrs[b * n + layer][src_indices]
            d[dp, layer] = s.view(len(dp), page_size, *s.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    sp = _pages(src_indices, page_size)
    for s, d in zip(src_ptrs, dst_ptrs, strict=False):
        x = s[sp, layer_id]
        d[dst_indices] = x.reshape(-1, *x.shape[2:])


def register():
    import importlib

    import sglang.srt.mem_cache.pool_host.common as common
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    # No CUDA: never register or pin host memory, whatever the pool was told.
    HostKVCache.pin_memory = property(lambda self: False, lambda self, v: None)
    common._cuda_host_register = lambda *a, **k: None
    for name in ("mha", "mla"):
        m = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for f in (transfer_kv_direct, transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
            setattr(m, f.__name__, f)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as T

    if not hasattr(T, "get_cpu_graph_seq_len_fill_value"):  # only DP attention's idle batches ask for it
        T.get_cpu_graph_seq_len_fill_value = lambda self: 1
