// While a caller is inside, it drives progress and the progress thread parks.
#pragma once

#include <cstdint>

#include "runtime/context.hpp"

namespace expertwire::runtime {

class Helping {
  public:
    explicit Helping(Context& context) : context_(context) { context_.enter_help(); }
    ~Helping() {
        if (inside_) context_.leave_help();
    }
    Helping(const Helping&) = delete;
    Helping& operator=(const Helping&) = delete;

    void sleep(std::uint32_t seen, TimeNs ns) {
        context_.leave_help();
        inside_ = false;
        context_.doorbell().wait(seen, ns);
        context_.enter_help();
        inside_ = true;
    }

  private:
    Context& context_;
    bool inside_ = true;
};

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace expertwire::runtime
