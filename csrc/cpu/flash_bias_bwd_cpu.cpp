// run_mha_bias_bwd_cpu: selects the kernel for the dtype and the CPU, and runs it over the tiles of dbias on all
// threads. Each tile is one sum of fixed order, so no result depends on the threads.
#include <algorithm>
#include <vector>

#include "common/trace.h"
#include "dispatch/run_flash.h"
#include "schedule.h"
#include "select_isa.h"

namespace flash {

void run_mha_bias_bwd_cpu(const Flash_bias_bwd_params &params) {
    const cpu::Isa isa = cpu::select_isa(params.dtype);
    const cpu::BiasBackwardKernel kernel = cpu::kernels_of(isa).bias_backward(params.dtype);
    const bool sums_rows = params.bias_rows == 1;
    const auto tiles_of = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile; };
    const int64_t row_tiles = sums_rows ? 1 : tiles_of(params.seqlen_q, kernel.panel_rows),
                  key_tiles = tiles_of(params.seqlen_k, kernel.step_keys),
                  tiles = row_tiles * key_tiles * params.bias_heads * params.bias_batch * params.parts,
                  threads = at::get_num_threads(),
                  pairs = int64_t(params.b / params.bias_batch) * (params.h / params.bias_heads);
    if (trace_enabled()) {
        trace("run_mha_bias_bwd_cpu", "isa=%s tiles=%lld threads=%lld", cpu::name_of(isa),
              static_cast<long long>(tiles), static_cast<long long>(std::min(threads, tiles)));
    }
    const auto compute = [&](int, int64_t index, void *scratch) {
        const auto take = [&](int64_t count) {
            const int64_t i = index % count;
            index /= count;
            return int(i);
        };
        cpu::BiasTile tile;
        tile.n_begin = take(key_tiles) * kernel.step_keys;
        tile.row_begin = take(row_tiles) * kernel.panel_rows;
        tile.row_end = sums_rows ? params.seqlen_q : std::min(tile.row_begin + kernel.panel_rows, params.seqlen_q);
        tile.bias_head = take(params.bias_heads);
        tile.bias_batch = take(params.bias_batch);
        tile.part = int(index);
        tile.pair_begin = pairs * tile.part / params.parts;
        tile.pair_end = pairs * (tile.part + 1) / params.parts;
        kernel.compute_dbias_1tile(params, tile, scratch);
    };
    cpu::run_tasks(std::vector<int>{0}, tiles, threads, kernel.scratch_bytes(params), compute);
}

}  // namespace flash
