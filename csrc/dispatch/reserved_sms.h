// SMs that a persistent grid leaves to kernels of other streams, such as those that move messages. Host only.
#pragma once

namespace flash {

// The number for the calls of this thread.
inline int &reserved_sms() {
    thread_local int count = 0;
    return count;
}

}  // namespace flash
