use proptest::prelude::*;

use super::*;

fn command(action: Action) -> Command {
    Command {
        at: 5,
        context: ContextId(6),
        stream: 7,
        ticket: 8,
        action,
    }
}

fn actions() -> [Action; 7] {
    [
        Action::Submit(Work::Kernel {
            nanos: 1,
            multiprocessors: 2,
        }),
        Action::Submit(Work::Copy {
            nanos: 1,
            direction: Direction::ToGpu,
        }),
        Action::Submit(Work::Copy {
            nanos: 1,
            direction: Direction::ToHost,
        }),
        Action::Submit(Work::Wait {
            stream: 3,
            ticket: 4,
        }),
        Action::Submit(Work::Record {
            event: 9,
            recording: 2,
        }),
        Action::Submit(Work::Host),
        Action::HostDone,
    ]
}

fn pair() -> (Channel, Channel) {
    let daemon = Channel::new().unwrap();
    let [memory, doorbell] = daemon.descriptors().map(|fd| fd.try_clone().unwrap());
    let client = Channel::open(memory, doorbell).unwrap();
    (daemon, client)
}

#[test]
fn delivers_commands_in_order_across_ring_wraparound() {
    let (daemon, client) = pair();
    for round in 0..3 * u64::from(RING) / 7 {
        for action in actions() {
            client.submit(Command {
                ticket: round,
                ..command(action)
            });
        }
        for action in actions() {
            assert_eq!(
                daemon.take(),
                Ok(Some(Command {
                    ticket: round,
                    ..command(action)
                }))
            );
        }
    }
    assert_eq!(daemon.take(), Ok(None));
}

#[test]
fn wakes_a_waiter_at_completion() {
    let (daemon, client) = pair();
    assert!(!client.wait(7, 1, Duration::ZERO));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| while !client.wait(7, 2, Duration::from_secs(10)) {});
        daemon.complete(7, 1);
        daemon.complete(7, 2);
        waiter.join().unwrap();
    });
    assert_eq!(client.completed(7), 2);
    daemon.record(9, 3, 44);
    assert_eq!(client.event(9), (3, 44));
}

#[test]
fn rings_a_sleeping_daemon() {
    let (daemon, client) = pair();
    assert!(!daemon.set_asleep(true));
    client.submit(command(Action::HostDone));
    let mut bell = [0; 8];
    assert_eq!(rustix::io::read(&daemon.doorbell, &mut bell), Ok(8));
    assert!(daemon.set_asleep(true));
}

#[test]
fn prevents_truncation_by_the_client() {
    let (daemon, _client) = pair();
    assert_eq!(ftruncate(&daemon.memory, 0), Err(Errno::PERM));
}

#[test]
fn rejects_a_ring_count_beyond_its_capacity() {
    let (daemon, client) = pair();
    client.layout.submitted.store(RING + 1, Ordering::Release);
    assert_eq!(daemon.take(), Err(NotACommand));
}

proptest! {
    /// Noise is rejected or decodes; decoded commands encode to the same words.
    #[test]
    fn rejects_or_decodes_noise(words in any::<[u64; WORDS]>(), kind in 0u64..9) {
        let words = [kind, words[1], words[2], words[3] % 40_000, words[4], words[5] % 140_000, words[6] % (1 << 33)];
        if let Some(command) = Command::decode(words) {
            prop_assert_eq!(Command::decode(command.encode()), Some(command));
            prop_assert!(command.stream < STREAMS);
        }
    }
}
