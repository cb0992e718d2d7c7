// A request that is submitted again and again, one at a time, and how it stands: what a prepared transfer is. Calls may
// come from several threads; none of them waits for another's submission.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "runtime/context.hpp"

namespace expertwire::runtime {

class PreparedRequest {
  public:
    // Beside the numbers of Status, of which pending means on its way, or about to be.
    static constexpr int never_submitted = -1;
    static constexpr int was_released = -2;

    PreparedRequest(std::shared_ptr<Context> context, PreparedChunks chunks);
    ~PreparedRequest();  // what is on its way keeps its memory
    PreparedRequest(const PreparedRequest&) = delete;
    PreparedRequest& operator=(const PreparedRequest&) = delete;

    // A submission: begin(); then took() or refused(). False: it is on its way, or was released.
    bool begin();
    const PreparedChunks& chunks();  // in between; checked anew where tables have changed: throws as Context::chunks()
    void took(Ticket ticket);
    void refused();  // it stands as before

    int status();                       // its end is noted when it is seen
    std::optional<Ticket> under_way();  // nothing where it has ended, or is being submitted
    bool release();                     // false: it is on its way
    std::int32_t code();                // the provider's number behind its failure, or 0

    struct Times {
        TimeNs posted_ns = 0;  // of CLOCK_MONOTONIC: when its submission began …
        TimeNs post_ns = 0;    // … and how long that took
        TimeNs wall_ns = 0;    // of CLOCK_REALTIME
        TimeNs ended_ns = 0;   // when its end was seen; 0: not yet
    };
    Times times();

    Context& context() { return *context_; }

  private:
    enum class Stage : std::uint8_t { ready = 0, submitting, active, ended, released };
    enum class Event : std::uint8_t { submit = 0, take, end, release };
    static std::optional<Stage> next(Stage stage, Event event);

    bool advance(Event event);
    void settle();
    int number() const;

    std::shared_ptr<Context> context_;
    PreparedChunks chunks_;
    std::mutex mutex_;  // of all below; held for bookkeeping only
    Stage stage_ = Stage::ready;
    Stage before_ = Stage::ready;  // its submission
    Ticket ticket_;
    Status result_ = Status::ok;
    std::int32_t code_ = 0;
    Times times_, begun_;
};

}  // namespace expertwire::runtime
