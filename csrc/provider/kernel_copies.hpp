// Where bulk should begin in its pages, for the sake of the kernel's copies of what sockets carry. Pure but for one
// question to the processor.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace expertwire {

// The kernel copies what is sent behind the provider's header (16 bytes before what is read, 40 before what is
// written; prov/tcp/src/tcpx_proto.h) into pages that it begins anew whenever the thread has nothing on its way, and it
// copies by `rep movsb` where the processor calls that fast for short ones (FSRM). AMD's since Zen 3 take up to ten
// times as long where the target begins 1 to 47 bytes further in its page than the source: 480 µs a MiB in place of 42
// at 8 to 31 bytes, 76 at 40 (benchmarks/README.md). So what begins a page, as large buffers do, is the worst case.
inline bool copies_slowly_when_ahead() {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(0, &a, &b, &c, &d) == 0 || b != signature_AMD_ebx) return false;
    constexpr unsigned fsrm = 1u << 4;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & fsrm) != 0;
#else
    return false;
#endif
}

// So many bytes of what lies at `address` are better sent by themselves, so that the rest begins in the middle of a
// page; 0: it begins well. Several headers that went before it are allowed for.
constexpr std::uint64_t lead_at(std::uint64_t address) {
    constexpr std::uint64_t page = 4096, middle = page / 2, ahead_most = 256, behind_most = 64;
    const std::uint64_t at = address % page;
    if (at >= ahead_most && at < page - behind_most) return 0;
    return (page + middle - at) % page;
}

}  // namespace expertwire
