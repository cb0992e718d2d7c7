// When bulk keeps out of the way of small work. A chunk costs both sides' cores what many small operations do, and one
// that has been posted cannot be taken back: so bulk waits while something small is on its way, to whichever peer, and
// goes on at once when that has ended; in a stream of small ones it goes in steps.
#pragma once

#include <algorithm>

#include "engine/types.hpp"

namespace expertwire {

class BulkHold {
  public:
    // `hold_ns`: beside small work one chunk in so long; 0: bulk is never held. `quiet_ns`: small ones that follow each
    // other sooner are a stream. `wary_ns`: for so long after something small has met chunks on their way they are few.
    BulkHold(TimeNs hold_ns, TimeNs quiet_ns, TimeNs wary_ns)
        : hold_ns_(hold_ns), quiet_ns_(quiet_ns), wary_ns_(wary_ns) {}

    bool active() const { return hold_ns_ > 0; }

    // A chunk of either kind is given out to be posted …
    void take(bool bulk, TimeNs now) {
        if (bulk) {
            ++bulk_;
            since_ = now;
            return;
        }
        if (bulk_ > 0) wary_until_ = now + wary_ns_;
        if (!beside(now)) since_ = now;
        stream_ = small_ > 0 || now < quiet_until_;
        ++small_;
        small_until_ = now + small_most_ns;
    }
    // … and is not on its way any more.
    void drop(bool bulk) { --(bulk ? bulk_ : small_); }
    void small_completed(TimeNs now) {
        quiet_until_ = now + quiet_ns_;
        completions_ += active();
    }
    std::uint64_t completions() const { return completions_; }  // of small ones, where bulk is ever held

    std::uint32_t taken(bool bulk) const { return bulk ? bulk_ : small_; }

    bool held(TimeNs now) const { return active() && beside(now) && now < since_ + hold_ns_; }
    bool wary(TimeNs now) const { return active() && now < wary_until_; }
    // Nothing small is about that a long operation would stand before.
    bool alone(TimeNs now) const { return !active() || (now >= wary_until_ && !beside(now)); }

  private:
    // What has not ended by then, as with a peer that has stopped, holds no others' bulk any more.
    static constexpr TimeNs small_most_ns = 1'000'000;

    bool beside(TimeNs now) const { return (small_ > 0 && now < small_until_) || (stream_ && now < quiet_until_); }

    TimeNs hold_ns_, quiet_ns_, wary_ns_;
    std::uint32_t small_ = 0, bulk_ = 0;  // on their way
    TimeNs since_ = 0;                    // the last chunk, or the first small one of those that are near each other
    TimeNs small_until_ = 0;
    TimeNs quiet_until_ = 0;
    TimeNs wary_until_ = 0;
    bool stream_ = false;
    std::uint64_t completions_ = 0;
};

}  // namespace expertwire
