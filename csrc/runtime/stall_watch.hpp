// When a wait in which nothing moves is to be told of, before it ends or runs out (SPEC E8): after 2 s, then every 5 s.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "engine/types.hpp"

namespace expertwire::runtime {

class StallWatch {
  public:
    using Report = std::function<void(const std::string&)>;

    // In the thread that waits, with no lock held.
    void on_stall(Report report) { report_ = std::move(report); }

    void moved(TimeNs now) {  // and where the wait begins
        moved_ns_ = now;
        due_ns_ = now + kFirstNs;
    }
    // `text(for how long)`: what is waited for, in words.
    template <class Text>
    void look(TimeNs now, Text text) {
        if (now < due_ns_) return;
        due_ns_ = now + kAgainNs;
        if (report_) report_(text(now - moved_ns_));
    }

  private:
    static constexpr TimeNs kFirstNs = 2'000'000'000;
    static constexpr TimeNs kAgainNs = 5'000'000'000;

    Report report_;
    TimeNs moved_ns_ = 0;
    TimeNs due_ns_ = 0;
};

}  // namespace expertwire::runtime
