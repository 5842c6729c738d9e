// draw_rng_state (rng_state.h).
#include "api/rng_state.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <limits>
#include <utility>

#include "api/checks.h"
#include "common/message.h"

namespace flash {

at::Tensor draw_rng_state(const at::Tensor &like, std::optional<at::Generator> generator) {
    FLASH_CHECK_VALUE(!generator.has_value() || generator->device().type() == like.device().type(), "generator is for ",
                      generator.has_value() ? generator->device() : like.device(),
                      "; allowed: one for the device of q, ", like.device());
    const c10::OptionalDeviceGuard device_guard(like.device());
    at::Tensor state = at::empty({2}, like.options().dtype(at::kLong).layout(at::kStrided));
    return state.random_(std::numeric_limits<int64_t>::min(), std::nullopt, std::move(generator));  // all 64 bits
}

at::Tensor rng_state_of_call(const at::Tensor &like, const std::optional<at::Tensor> &given,
                             std::optional<at::Generator> generator) {
    if (!given.has_value() || given->numel() == 0) {
        return draw_rng_state(like, std::move(generator));
    }
    check_rng_state(given, /*dropout_p=*/1.0, like);
    return given->clone();
}

}  // namespace flash
