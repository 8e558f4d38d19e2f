//! Device handles: numbers in the shape of pointers, checked at every use and never followed.

use nvml_wrapper_sys::bindings::nvmlDevice_t;

use drava_mock_machine::description::{CardDescription, CardModel};
use drava_mock_machine::protocol::{CardIndex, CardState, Figure};

use crate::abi::Answer;
use crate::error::NvmlError;
use crate::library::{Library, library};

/// Start of the range that handles of cards come from. Nothing is ever mapped so high.
const CARDS: usize = 0x0100_6e76_6d6c_0000;

/// A valid handle of a card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) library: &'static Library,
    pub(crate) card: CardIndex,
}

/// The handle for a card.
pub(crate) fn handle(card: CardIndex) -> nvmlDevice_t {
    let index = usize::try_from(card.0).unwrap_or(usize::MAX);
    std::ptr::without_provenance_mut(CARDS.wrapping_add(index))
}

/// The card behind a handle.
pub(crate) fn device(handle: nvmlDevice_t) -> Answer<Device> {
    let library = library()?;
    let index = handle.addr().wrapping_sub(CARDS);
    let card = u32::try_from(index).map(CardIndex).ok();
    let card = card.filter(|card| library.visible().contains(card));
    let card = card.ok_or(NvmlError::InvalidArgument)?;
    Ok(Device { library, card })
}

impl Device {
    pub(crate) fn model(&self) -> Answer<&'static CardModel> {
        self.library.model(self.card)
    }

    pub(crate) fn described(&self) -> Answer<&'static CardDescription> {
        self.library.card(self.card)
    }

    pub(crate) fn state(&self) -> Answer<CardState> {
        self.library.state(self.card)
    }

    /// The state, for a figure that the card may not report.
    pub(crate) fn reporting(&self, figure: Figure) -> Answer<CardState> {
        let state = self.state()?;
        match state.unsupported.contains(&figure) {
            true => Err(NvmlError::NotSupported),
            false => Ok(state),
        }
    }

    /// NVML's index: the position among the cards that this process can see.
    pub(crate) fn index(&self) -> Answer<u32> {
        let position = self
            .library
            .visible()
            .iter()
            .position(|card| *card == self.card);
        position
            .and_then(|position| u32::try_from(position).ok())
            .ok_or(NvmlError::InvalidArgument)
    }
}
